"""What the process that verifies is to compute with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.verify.reference.selection import Selection
from sdflow.verify.reference.torch_module import LoraMerge


@dataclass(frozen=True)
class ReferenceRequest:
    """What to compute. family: its name. loads: submodel -> how to load it. companions: of the family -> folder.
    options: of the family. scheduler: by name, in place of the one that lies there. bfloat16: the submodels whose 16 bits are
    those. most: submodel -> bytes of its weights in memory at a time, of those that do not fit whole."""

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
        """The type of 16 bits that the submodel is also computed in."""
        return "bfloat16" if submodel in self.bfloat16 else "float16"
