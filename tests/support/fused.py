"""Submodels as a shipped workflow builds them for a target, from conversions that are made once for a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converted import Converted, artifact_of

from sdflow.artifact import Artifact
from sdflow.config import load_workflow
from sdflow.disk.shipped import shipped_workflow
from sdflow.passes.base import PassInputs
from sdflow.passes.registry import catalog, find_pass
from sdflow.sources import Checkpoint
from sdflow.weights.faster_fusion import faster_fusion


class Fused:
    """Gives a checkpoint's submodels, converted once for a whole run, with what the other passes of a shipped workflow make
    of them for a target."""

    def __init__(self, workflow: str, target: str, converted: Converted, root: Path) -> None:
        file = shipped_workflow(f"base/{workflow}.yaml")
        assert file is not None
        (self.spec,) = load_workflow(file, catalog=catalog(), targets=(target,)).pipelines
        self.converted, self.root = converted, root

    def __call__(self, checkpoint: Checkpoint, names: Any = None) -> dict[str, Artifact]:
        family = checkpoint.family.name
        return {name: self._passed(name, each, family) for name, each in self.converted(checkpoint, names).items()}

    def _passed(self, name: str, artifact: Artifact, family: str) -> Artifact:
        for step in self.spec.submodels[name][1:]:
            if step.pass_name == "LoraMerge":
                continue
            implementation = find_pass(step.pass_name, step.folder)
            out = self.root / name / step.pass_name
            out.mkdir(parents=True)
            inputs = PassInputs(name, artifact.path, {}, family)
            with faster_fusion():  # as in a build; that it gives the same: tests/weights
                implementation().run(inputs, out, implementation.Config(**step.options))
            artifact = artifact_of(out)
        return artifact
