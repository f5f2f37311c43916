"""A pipeline for a GPU as one graph, in float16 with the target's own operators: lowered, loop and all, it draws on the CPU what
its submodels draw in diffusers' loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.export.lowered_one_file import Draw, by_plain_loop, by_pytorch
from sdflow.build.assemble import assemble
from sdflow.distance import psnr
from sdflow.export.one_file import Wanted, export_one_file
from sdflow.manifest import Origin
from sdflow.store import Cache
from sdflow.tolerances import DECIBELS_BEHIND, IMAGE_DECIBELS
from tests.verify.sample_artifacts import DRAWING, Sample, build

STEPS = 2


def draw_of(sample: Sample, target: str, folder: Path) -> Draw:
    checkpoint = sample.checkpoint
    assemble(
        folder,
        parts={name: sample.steps[name][-1].record.artifact for name in DRAWING},
        companions=checkpoint.companions,
        origin=Origin("shapes", target, model="sample:shapes", checkpoint=checkpoint.provenance),
        options=checkpoint.options,
    )
    return Draw(folder, np.random.default_rng(0).standard_normal((1, 4, 8, 8), np.float32), STEPS)


@pytest.fixture(scope="module")
def drawn(cuda: Sample, tmp_path_factory: pytest.TempPathFactory) -> Draw:
    return draw_of(cuda, "cuda", tmp_path_factory.mktemp("one_file") / "sample")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rocm", "directml", "tensorrt"])
def test_a_graph_for_any_target_draws_what_its_submodels_draw(target: str, code_cache: Cache, tmp_path: Path) -> None:
    sample = build(code_cache, tmp_path, target)
    require_same(draw_of(sample, target, tmp_path / "sample"), tmp_path)


def test_a_graph_for_cuda_draws_what_its_submodels_draw(drawn: Draw, tmp_path: Path) -> None:
    require_same(drawn, tmp_path)


def require_same(drawn: Draw, tmp_path: Path) -> None:
    image, told = drawn.graph(tmp_path / "one.onnx")
    scale = told["guidance_scale"]
    plain = by_plain_loop(drawn.folder, drawn.noise, STEPS, scale, 1)
    assert psnr(image, plain) > IMAGE_DECIBELS["float32"], "the same graphs, the same roundings"
    exact = by_pytorch(drawn.folder, drawn.noise, STEPS, scale, False)
    assert exact.std() > 0.05, "an image, not a grey plane"
    found = psnr(image, exact)
    if found < IMAGE_DECIBELS["float16"]:
        half = by_pytorch(drawn.folder, drawn.noise, STEPS, scale, True)
        assert found > psnr(half, exact) - DECIBELS_BEHIND


def test_every_operator_of_the_denoiser_stays_what_it_was(drawn: Draw, tmp_path: Path) -> None:
    export_one_file(drawn.folder, tmp_path / "one.onnx", Wanted())
    whole = onnx.load(tmp_path / "one.onnx", load_external_data=False).graph
    (loop,) = (node for node in whole.node if node.op_type == "Loop")
    ours = onnx.load(drawn.folder / "unet/model.onnx", load_external_data=False).graph
    contrib = {
        domain: Counter(node.op_type for node in nodes if node.domain == "com.microsoft")
        for domain, nodes in (("ours", ours.node), ("loop", [*whole.node, *loop.attribute[0].g.node]))
    }
    for kind, count in contrib["ours"].items():
        assert contrib["loop"][kind] >= count > 0, kind
    half = [tensor for tensor in loop.attribute[0].g.initializer if tensor.data_type == onnx.TensorProto.FLOAT16]
    assert half, "its weights are float16"
