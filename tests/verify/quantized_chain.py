"""A small submodel at the end of a chain that quantizes it, and what PyTorch computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.passes.worker import run_pass
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.verify.artifact.exact import Proof, prove
from sdflow.verify.artifact.graph import open_graph
from sdflow.verify.artifact.judge_submodel import judge_submodel
from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.artifact.stored import BoundModel
from sdflow.verify.reference.cases import Cases
from sdflow.verify.result import SubmodelVerdict
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.lora import LoraInput
from sdflow.weights.structure import hollow
from tests.verify.sample_artifacts import reference

SUBMODEL = "text_encoder"
LAYER = "text_model.encoder.layers.0.mlp.fc1.weight"
FUSED: Mapping[str, Mapping[str, Any]] = {
    "OnnxConversion": {"target_opset": 17},
    "OrtTransformersOptimization": {"model_type": "clip", "opt_level": 0, "float16": False},
}
"""Pass -> its options: what any such chain begins with."""


@dataclass(frozen=True)
class Built:
    """The structure of a submodel without weights, and what PyTorch computes. target: that it is built for."""

    checkpoint: Checkpoint
    structure: Path
    cases: Cases
    folder: Path
    target: str
    submodel: str = SUBMODEL

    def bound(self, out: Path, *loras: LoraInput) -> Path:
        out.mkdir()
        bind(BindRequest(self.submodel, self.structure, self.checkpoint.submodels[self.submodel].load, loras), out)
        return out

    def proof(self, folder: Path, structure: Path | None = None, most: int | None = None) -> Proof:
        bound = BoundModel(folder, self.checkpoint.submodels[self.submodel].load)
        check = RecipeCheck(self.submodel, structure or self.structure, bound)
        return prove(check, self.cases, threads=1, most=most)

    def verdict(self, folder: Path, stated: float | None) -> SubmodelVerdict:
        return judge_submodel(self.submodel, open_graph(folder, self.target, threads=1), self.cases, stated)


def build(
    folder: Path,
    target: str,
    further: Mapping[str, Mapping[str, Any]],
    source: str = "synthetic:sd15-tiny",
    submodel: str = SUBMODEL,
    begin: Mapping[str, Mapping[str, Any]] = FUSED,
) -> Built:
    """Run the chain of a submodel of `source` without weights, in `folder`. further: the passes behind `begin`, with their
    options."""
    checkpoint = open_checkpoint(source, digests=PlainDigests(), download=False)
    load, model = checkpoint.submodels[submodel].load, None
    for name, config in {**begin, **further}.items():
        (out := folder / name).mkdir()
        request = {"pass": name, "folder": ".", "submodel": submodel, "model": str(model) if model else None}
        request |= {"symbolic": True, "family": checkpoint.family.name, "checkpoint": {} if model else hollow(load)}
        run_pass({**request, "loras": [], "config": dict(config), "out": str(out)}, lambda phrase: None)
        model = out
    assert model is not None
    (computed := folder / "reference").mkdir()
    cases = reference(computed, checkpoint, (submodel,))[submodel]
    return Built(checkpoint, model, cases, folder, target, submodel)
