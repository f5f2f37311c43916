"""The result of `sdflow inspect` for a file or folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PIPELINE, BUILT = "pipeline folder", "built pipeline"
"""Kinds of folders; those of files are in `sdflow.sources.recognition`."""

DRAWS_WITH = "draws with"
"""The detail with the default settings of a few-step model."""


@dataclass(frozen=True)
class Description:
    """What `sdflow inspect` says about a file or folder.

    kind: in words. of: titles of the models that it is of or for. architecture: the shipped one with its shapes.
    precision: of its weights. missing: what a pipeline needs besides. details: further facts by name. notes: for the
    user. workflow: lines of a workflow that uses it. command: a command that uses it.
    """

    path: str
    kind: str
    of: tuple[str, ...] = ()
    architecture: str | None = None
    precision: str | None = None
    missing: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    workflow: str | None = None
    command: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
