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
    options: of the family. scheduler: by name, in place of the one that lies there."""

    family: str
    loads: Mapping[str, Mapping[str, Any]]
    companions: Mapping[str, Path]
    loras: Sequence[LoraMerge]
    selection: Selection
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "loads": dict(self.loads),
            "companions": {name: str(path) for name, path in self.companions.items()},
            "loras": [{"path": str(lora.path), "scale": lora.scale} for lora in self.loras],
            "selection": self.selection.to_json(),
            "out": str(self.out),
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReferenceRequest:
        return cls(
            family=value["family"],
            loads=value["loads"],
            companions={name: Path(path) for name, path in value["companions"].items()},
            loras=[LoraMerge(Path(lora["path"]), lora["scale"]) for lora in value["loras"]],
            selection=Selection.from_json(value["selection"]),
            out=Path(value["out"]),
            options=value["options"],
            scheduler=value["scheduler"],
        )
