"""What the process that verifies is to hold to PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.reference.torch_module import TorchModule


@dataclass(frozen=True)
class JudgeRequest:
    """What to verify. folder: an assembled pipeline of the family of this name. reference: what
    `sdflow.verify.reference.reference`
    wrote. out: for PNGs. modules: the PyTorch models, for what is rounded in several ways. recipes: the structures that the
    weights were bound to. unproved: why there is none, of the submodels without. allow_fallback: what the target has no kernel
    for is a warning. quantized: `to` and `limit` of each submodel that sdflow.json says is quantized. tuning: what
    `sdflow tune` chose for run_on; the process that verifies has a home of its own, and would not find it.
    """

    family: str
    folder: Path
    name: str
    target: str
    level: str
    submodels: Sequence[str]
    reference: Path
    out: Path
    modules: Sequence[TorchModule] = ()
    recipes: Sequence[RecipeCheck] = ()
    unproved: Mapping[str, str] = field(default_factory=dict)
    allow_fallback: bool = False
    threads: int | None = None
    run_on: str | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        paths = {key: str(getattr(self, key)) for key in ("folder", "reference", "out")}
        modules, recipes = ([each.to_json() for each in some] for some in (self.modules, self.recipes))
        return {
            **vars(self),
            **paths,
            "submodels": list(self.submodels),
            "modules": modules,
            "recipes": recipes,
            "unproved": dict(self.unproved),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JudgeRequest:
        paths = {key: Path(value[key]) for key in ("folder", "reference", "out")}
        modules = [TorchModule.from_json(each) for each in value["modules"]]
        recipes = [RecipeCheck.from_json(each) for each in value["recipes"]]
        return cls(**{**value, **paths, "modules": modules, "recipes": recipes})
