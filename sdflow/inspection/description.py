"""What `sdflow inspect` found of a file or folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PIPELINE, BUILT = "pipeline folder", "built pipeline"
"""Kinds of folders; those of files are in `sdflow.sources.recognition`."""

DRAWS_WITH = "draws with"
"""The detail that says the defaults of what draws in few steps."""


@dataclass(frozen=True)
class Description:
    """kind: what it is, in words. of: titles of the models that it is of or for. architecture: the shipped one of its shapes.
    precision: of its weights. missing: what a pipeline needs besides. details: what else is known, by name. notes: for the
    user to hear of. workflow: lines of a workflow that takes it; command: a command that does.
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
