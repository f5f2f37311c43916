"""`sdflow bench`, `sdflow verify --run-on`, and what `sdflow selftest` measures with, run to the end on SwiftShader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import swiftshader
import torch
from converted import Converted
from diffusers import AutoencoderKL, UNet2DConditionModel
from fused import Fused
from on_webgpu import verified

from sdflow.bench.evaluate import evaluate
from sdflow.bench.run import BenchRequest, bench
from sdflow.bench.sweep import Settings, SweepPoint
from sdflow.build.assemble import assemble
from sdflow.config.workflow import EvaluateSpec, ImageSpec, LatencySpec
from sdflow.manifest import Origin
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.store import Cache
from sdflow.verify.report.rows import device_rows

MISSING = swiftshader.missing()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
    pytest.mark.filterwarnings("ignore::sdflow.errors.SlowerWarning"),
]
SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    with swiftshader.swiftshader():
        yield


@pytest.fixture(scope="module")
def smallest(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1 for WebGPU with a UNet of one level and a VAE of two: SwiftShader is slow."""
    root = tmp_path_factory.mktemp("smallest")
    made = load_pipeline(open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False))
    torch.manual_seed(0)
    few: dict[str, Any] = {"layers_per_block": 1, "norm_num_groups": 4}
    unet = UNet2DConditionModel.from_config(
        made.unet.config,
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        sample_size=SIZE // 2,
        **few,
    )
    vae = AutoencoderKL.from_config(
        made.vae.config,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **few,
    )
    made.register_modules(unet=unet, vae=vae, safety_checker=None)
    made.save_pretrained(root / "checkpoint")
    checkpoint = open_checkpoint(str(root / "checkpoint"), digests=PlainDigests(), download=False)
    assemble(
        root / "pipeline",
        parts=Fused("tiny", "webgpu", converted, root / "passes")(checkpoint),
        companions=checkpoint.companions,
        origin=Origin("smallest", "webgpu", str(root / "checkpoint"), checkpoint.provenance),
        options=checkpoint.options,
    )
    return root / "pipeline"


@pytest.mark.slow
def test_an_evaluation_times_every_submodel_on_the_provider(smallest: Path) -> None:
    once = EvaluateSpec(LatencySpec(warmup=1, runs=1), ImageSpec(steps=1, height=SIZE, width=SIZE))
    found = evaluate(smallest, once, "webgpu", required=True)
    assert (found.measured, found.failure, found.provider) == (True, None, "WebGpuExecutionProvider")
    assert found.submodels.keys() == {"text_encoder", "unet", "vae_encoder", "vae_decoder"}
    for part in found.submodels.values():
        assert part.placement.fallen == ()
        assert part.latency is not None and part.latency.median_ms > 0
    assert found.pipeline is not None and found.pipeline.median_ms > 0


def test_a_bench_finds_its_image_right(smallest: Path) -> None:
    once = Settings(warmup=0, rounds=1, threads=1)
    request = BenchRequest(smallest, [SweepPoint(1, SIZE, SIZE, 1)], once, ["ort-webgpu"])
    (engine,) = bench(request, lambda text: None).engines
    assert (engine.status, engine.provider, engine.dtype) == ("measured", "WebGpuExecutionProvider", "float32")
    assert engine.cases[0] is not None and engine.cases[0].verdict == "right"


def test_a_unet_is_verified_by_running_it(smallest: Path, tmp_path: Path) -> None:
    """Of latents of one size one image alone, as each size and number has programs of its own, which SwiftShader compiles."""
    checkpoint = open_checkpoint(str(smallest.parent / "checkpoint"), digests=PlainDigests(), download=False)
    found = verified(smallest, checkpoint, Cache(tmp_path / "cache"), ["unet"], guidance_scale=1.0)
    assert found.passed, found.failure()
    device = found.submodels["unet"].device
    assert device is not None and device.target == "webgpu"
    assert device.left_out >= 2, "of the trajectory and of three timesteps, the first and the last are run"
    assert all(each.passed and each.distance > 0 for each in device.outputs)
    assert f"emulated GPU: {device.left_out} further cases" in device_rows(found)[0]
