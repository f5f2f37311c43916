"""What the tests of WebGPU share: small pipelines built for it, run and verified on SwiftShader in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from beside_diffusers import put_together
from converted import Converted
from fused import Fused

from sdflow.artifact import MODEL_FILE
from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.processes.worker_group import WorkerGroup
from sdflow.processes.workers import WorkerResult
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.placement import Placement, placement
from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint
from sdflow.store import Cache
from sdflow.verify import Subject, Verification, verify
from sdflow.verify.worker import work

TOLERANCE = 1e-3
"""Of pixel values in [0, 1], float32."""


class Built:
    """A family's small pipeline, for WebGPU and of diffusers."""

    def __init__(self, workflow: str, root: Path, converted: Converted) -> None:
        fused = Fused(workflow, "webgpu", converted, root / "passes")
        checkpoint = open_checkpoint(fused.spec.model, digests=PlainDigests(), download=False)
        self.workflow, self.folder = workflow, put_together(checkpoint, fused, root / "pipeline")  # type: ignore[arg-type]
        self.checkpoint, self.theirs = checkpoint, load_pipeline(checkpoint)
        if "safety_checker" in self.theirs.components:
            self.theirs.register_modules(safety_checker=None)
        self.theirs.set_progress_bar_config(disable=True)

    def graph(self, submodel: str) -> Any:
        return onnx.load(self.folder / submodel / MODEL_FILE, load_external_data=False)


class Here(WorkerGroup):
    """Verifies in this process, which has made the adapter's programs."""

    def run(self, module: str, request: Mapping[str, Any], **how: Any) -> WorkerResult:
        return WorkerResult(work(request, how["on_phase"]), 0.0, 0)


def verified(
    folder: Path, checkpoint: Checkpoint, cache: Cache, submodels: Sequence[str], guidance_scale: float = 5.0
) -> Verification:
    """On WebGPU and, before, on the processor."""
    subject = Subject("small", "webgpu", folder, checkpoint, image=ImageSpec(guidance_scale=guidance_scale))
    return verify(subject, VerifySpec(steps=1), cache, submodels=submodels, run_on="webgpu", group=Here()).result


def assert_on_webgpu(pipeline: Pipeline, folder: Path) -> None:
    """Every node of the last session of every submodel."""
    assert any(each._session is not None for each in pipeline.submodels.values())
    for name, submodel in pipeline.submodels.items():
        if submodel._session is not None:
            found: Placement = placement(submodel._session, folder / name / MODEL_FILE)
            assert found.provider == "WebGpuExecutionProvider"
            assert not found.fallen, f"{name}: {[str(node) for node in found.fallen]}"
