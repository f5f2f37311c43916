"""On two devices, guidance's halves are computed at the same time, and images are those of one device.

Here both devices are this CPU, in two threads with a session each: the same code as on two GPUs, except for streams.
"""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, SIZE, differ, generator, pattern, put_together
from converted import Converted

from sdflow.errors import TargetUnavailableError, UsageError
from sdflow.runtime.denoiser.halves import HalvesDenoiser
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.drawing import loaded
from sdflow.runtime.drawing.devices import require_devices
from sdflow.runtime.generate import generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions import place
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.targets import find_target

NEAR = 1e-6
"""Root mean square of pixels in [0, 1]: products of other batch sizes are summed in another order."""

CASES: dict[str, dict[str, Any]] = {
    "several": {"num_images_per_prompt": 2, "negative_prompt": "blurry"},
    "from an image": {"image": pattern(5), "strength": 0.8},
    "fewer": {
        "guidance_interval": {"from": 0.0, "to": 0.7},
        "reuse": {"every": 2, "from": 0.0, "to": 1.0, "layers": 1},
    },
}


@pytest.fixture(scope="module")
def two(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, devices=2)


def draw(pipeline: Pipeline, **more: Any) -> Any:
    settings = {"num_inference_steps": 4, "height": SIZE, "width": SIZE, "output_type": "np", **more}
    return pipeline(PROMPT, generator=generator(), **settings).images


def distance(drawn: Any, expected: Any) -> float:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    return float(np.sqrt(np.mean((drawn - expected) ** 2, dtype=np.float64)))


def test_images_of_two_devices_are_those_of_one(tiny_pipeline: Path, two: Pipeline) -> None:
    """Those of SDXL and SD3.5 are compared with diffusers' in test_families.py and test_stable_diffusion_3_job.py."""
    one = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    drawn = {name: draw(two, **case) for name, case in CASES.items()}
    for name, case in CASES.items():
        expected = draw(one, **case)
        assert (found := distance(drawn[name], expected)) <= NEAR, f"{name}: {found:.1e}"
    assert differ(expected, draw(one, **CASES["fewer"], guidance_scale=1.5)), "guidance changes nothing"
    assert (draw(two, **CASES["fewer"]) == drawn["fewer"]).all(), "drawn again"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_images_of_two_gpus_are_those_of_one(tiny_pipeline: Path) -> None:
    one, two = (Pipeline.load(tiny_pipeline, "cuda", checker=False, devices=devices) for devices in (1, 2))
    for case in CASES.values():
        assert distance(draw(two, **case), draw(one, **case)) <= 1e-3, "TensorFloat-32 rounds to 10 bits"


@pytest.mark.slow
def test_reference_images_are_read_by_both_halves(converted: Converted, tmp_path: Path) -> None:
    checkpoint = open_checkpoint("synthetic:flux2-base-tiny", digests=PlainDigests(), download=False)
    folder = put_together(checkpoint, converted, tmp_path / "pipeline")
    one, two = (Pipeline.load(folder, "cpu", threads=1, devices=devices) for devices in (1, 2))
    given = {"references": [pattern(7)], "guidance_scale": 4.0}
    assert distance(draw(two, **given), draw(one, **given)) <= NEAR


def test_both_halves_are_computed_at_the_same_time(two: Pipeline) -> None:
    drawing = two.drawing(PROMPT, num_inference_steps=4, height=SIZE, width=SIZE, generator=generator())
    assert isinstance(drawing.denoiser, HalvesDenoiser)
    drawing.step()  # the first may be captured: one half after the other
    meeting, threads = threading.Barrier(2, timeout=30), set[int]()
    for half in (drawing.denoiser._first, drawing.denoiser._second):
        run = half.run

        def met(*arguments: Any, run: Any = run) -> Any:
            threads.add(threading.get_ident())
            meeting.wait()  # breaks unless the other half arrives too
            return run(*arguments)

        half.run = met  # type: ignore[method-assign]
    drawing.run()
    assert len(threads) == 2 and drawing.done
    del drawing.denoiser._first.run, drawing.denoiser._second.run


def test_a_half_that_fails_is_reported_and_the_next_run_is_right(two: Pipeline) -> None:
    drawing = two.drawing(PROMPT, num_inference_steps=3, height=SIZE, width=SIZE, generator=generator())
    expected = drawing.denoiser.run(drawing.inputs, drawing.latents(), 0).clone()
    broken = replace(drawing.inputs.schedule, timesteps=drawing.inputs.schedule.timesteps.bool())
    with pytest.raises(Exception, match=r"type|bool"):
        drawing.denoiser.run(replace(drawing.inputs, schedule=broken), drawing.latents(), 0)
    assert torch.equal(drawing.denoiser.run(drawing.inputs, drawing.latents(), 0), expected)


def distilled(tiny_pipeline: Path, out: Path) -> Path:
    """The folder of a model that takes the guidance scale as an input, without its weights."""
    shutil.copytree(tiny_pipeline, out, ignore=shutil.ignore_patterns("*.data"))
    config = out / "unet/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "time_cond_proj_dim": 32}))
    return out


def test_what_cannot_be_halved_is_refused_before_anything_is_drawn(
    tiny_pipeline: Path, two: Pipeline, tmp_path: Path
) -> None:
    for options, words in (
        ({"devices": 3}, "3 devices were requested, but a pipeline runs on at most 2"),
        ({"devices": 2, "low_memory": True}, "low_memory loads one submodel at a time"),
    ):
        with pytest.raises(UsageError, match=words):
            Pipeline.load(tiny_pipeline, "cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the target tensorrt supports only one device"):
        require_devices(2, tiny_pipeline, find_target("tensorrt", "--target"), low_memory=False)
    with pytest.raises(UsageError, match="takes no negative prompt, so there is nothing to compute"):
        Pipeline.load(distilled(tiny_pipeline, tmp_path / "distilled"), "cpu", devices=2)
    with pytest.raises(UsageError, match="guidance is off, so there is nothing to compute"):
        draw(two, guidance_scale=1.0)


def test_generate_says_what_two_devices_need(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = GenerateRequest(tiny_pipeline, ["a horse"], out=tmp_path, devices=2)
    with pytest.raises(UsageError, match="the target cpu runs on one device") as failed:
        generate(replace(request, target="cpu"))
    assert failed.value.where == "--devices"
    with pytest.raises(UsageError, match="guidance is off") as failed:
        generate(replace(request, target="cuda", guidance_scale=1.0))
    assert failed.value.where == "--guidance-scale"


def test_a_second_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TargetUnavailableError, match="torch sees 1 CUDA device, so there is no cuda:1"):
        place.place("cuda:1")


def test_a_second_gpu_that_is_not_there_is_named_when_loading(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before CUDA is asked for its memory, which raises a RuntimeError."""
    monkeypatch.setattr(loaded, "onnxruntime_for", lambda target: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TargetUnavailableError, match="torch sees 1 CUDA device, so there is no cuda:1"):
        Pipeline.load(tiny_pipeline, "cuda", devices=2)
