"""Weights that are copied to the device while the model runs: the images are bit for bit those of weights that stay.

The CPU's operator copies in a thread of its own, which begins late, so that a reader that does not wait reads old values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from beside_diffusers import put_together
from converted import Converted

from sdflow.models.base import Role
from sdflow.runtime.files.folder import (
    folder_defaults,
    folder_family,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
)
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.session import LoadOptions, read_graph
from sdflow.runtime.sessions.stream_plan import StreamBuffers, StreamPlan, buffer_size, stream_plan
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.targets import TARGETS

ARCHITECTURES = ("sd35-tiny", "flux2-tiny", "z-image-tiny", "sdxl-tiny")
LEAST, SEGMENT = 1 << 10, 1 << 15


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, converted: Converted) -> Path:
    checkpoint = open_checkpoint(f"synthetic:{request.param}", digests=PlainDigests(), download=False)
    return put_together(checkpoint, converted, tmp_path_factory.mktemp("streams") / "pipeline")


def plan_of(folder: Path, share: float) -> StreamPlan:
    """Of the denoiser, keeping this share of its weights."""
    family = folder_family(folder)
    path = folder / family.denoiser / "model.onnx"
    size = path.with_name("model.onnx.data").stat().st_size
    graph = read_graph(path)
    buffers = StreamBuffers(buffer_size(graph, least=LEAST, segment=SEGMENT))
    plan = stream_plan(graph, int(share * size), buffers, latents_of(folder), least=LEAST)
    assert plan is not None
    return plan


def latents_of(folder: Path) -> str:
    family = folder_family(folder)
    submodel = load_submodel(folder, family.denoiser, TARGETS["cpu"], lazy=True)
    return submodel.port(Role.LATENTS)


def drawn(folder: Path, plan: StreamPlan | None, delay: int = 0) -> np.ndarray:
    family, target = folder_family(folder), TARGETS["cpu"]
    options = LoadOptions(threads=1)
    loaded = {
        name: load_submodel(
            folder,
            name,
            target,
            lazy=True,
            options=options,
            plan=plan if name == family.denoiser else None,
            delay=delay,
        )
        for name in onnx_submodels(folder)
    }
    pipeline = Pipeline(family, loaded, load_companions(folder), read_options(folder), defaults=folder_defaults(folder))
    made = pipeline("a fox", num_inference_steps=3, generator=torch.Generator().manual_seed(1), output_type="latent")
    return np.asarray(made.images)


def test_streamed(folder: Path) -> None:
    plan = plan_of(folder, 0.5)
    print(plan.size, plan.buffers.size, plan.resident, plan.per_run, len(plan.streamed))
    resident = drawn(folder, None)
    streamed = drawn(folder, plan, 300)
    print(np.abs(resident - streamed).max(), resident.std())
    np.testing.assert_array_equal(resident, streamed)
