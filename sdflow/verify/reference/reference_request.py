"""The request for PyTorch's results to the verifying process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.verify.reference.selection import Selection
from sdflow.verify.reference.torch_module import LoraMerge


@dataclass(frozen=True)
class ReferenceRequest:
    """What the reference computes.

    family: its name. loads: submodel -> how to load it. companions: the family's -> folder. options: the family's.
    scheduler: name of the one that replaces the stored one. bfloat16: submodels whose 16-bit type is bfloat16. most:
    submodel -> limit in bytes for its weights in memory, if they do not fit whole.
    """

    family: str
    loads: Mapping[str, Mapping[str, Any]]
    companions: Mapping[str, Path]
    loras: Sequence[LoraMerge]
    selection: Selection
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    bfloat16: Sequence[str] = ()
    most: Mapping[str, int] = field(default_factory=dict)

    def half_of(self, submodel: str) -> str:
        """The 16-bit type in which the submodel is also computed."""
        return "bfloat16" if submodel in self.bfloat16 else "float16"
