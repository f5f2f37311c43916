"""Requests share each run of the denoiser and get the images that each alone would have got."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.served_pipeline import ServedPipeline, preview_steps
from sdflow.serve.jobs import Begun, Drawn, Failed, Image, Job, LoraFile, Message, Preview, Stepped, Turned

SECONDS = {1: 1.0, 4: 1.5}
"""Few sizes: each is a session of its own, for each size of image, with guidance and without."""


@pytest.fixture(scope="module")
def served(tiny_pipeline: Path) -> ServedPipeline:
    return ServedPipeline(Pipeline.load(tiny_pipeline, "cpu", threads=1))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a batch is made when it is first wanted."""
    monkeypatch.setattr("sdflow.serve.engine.shared_steps.LACKED_RUNS", 0)


def pixels(seed: int) -> Image:
    return Image("RGB", (64, 64), np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8).tobytes())


HALF = Image("L", (64, 64), np.repeat(np.array([0, 255], np.uint8), 2048).tobytes())


def job(number: int, **options: Any) -> Job:
    arguments = {"height": 64, "width": 64, **options.pop("arguments", {})}
    return Job(f"request {number}", 0, "tiny", f"thing number {number}", seed=number, arguments=arguments, **options)


def call(steps: int, guidance: float, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": steps, "guidance_scale": guidance, **more}


MIXED = (
    job(0, arguments=call(3, 7.5), scheduler="ddim"),
    job(1, arguments=call(5, 1.0), scheduler="euler", negative_prompt="bad"),
    job(2, arguments=call(4, 3.0), scheduler="euler_a"),
    job(3, arguments=call(6, 7.5, strength=0.6), scheduler="dpm++_2m", image=pixels(3)),
    job(4, arguments=call(4, 2.0), scheduler="unipc", image=pixels(4), mask=HALF),
    job(5, arguments=call(3, 1.0), scheduler="pndm"),
    job(6, arguments=call(2, 1.5), scheduler="lcm"),
    job(7, arguments=call(7, 9.0), negative_prompt="blurred"),
    job(8, arguments=call(4, 4.0, eta=0.5), scheduler="ddim"),
    job(9, arguments=call(3, 7.5, height=128), scheduler="heun_karras"),
    job(10, arguments=call(5, 7.5, clip_skip=1), scheduler="dpm++_2m_sde_exponential"),
    job(11, arguments=call(3, 5.0, prompt_syntax="a1111"), negative_prompt="(ugly:1.4)", scheduler="dpm2_a"),
)


def run(engine: Engine, jobs: Sequence[Job], at_once: int) -> None:
    """Some are there at the start, and another comes at each turn."""
    late = list(jobs[at_once:])
    for each in jobs[:at_once]:
        engine.submit(each)
    while engine.busy or late:
        if late:
            engine.submit(late.pop(0))
        engine.turn()


def decoded(file: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(file)), np.int16)


def alone(pipeline: Pipeline, each: Job) -> np.ndarray:
    """What the pipeline draws of it by itself, by the way that `sdflow generate` goes."""
    own = pipeline.scheduler
    start = {
        name: PIL.Image.frombytes(given.mode, given.size, given.pixels)
        for name, given in (("image", each.image), ("mask_image", each.mask))
        if given is not None
    }
    try:
        if each.scheduler:
            pipeline.scheduler = named_scheduler(each.scheduler, own.config, DIFFUSION)
        result = pipeline(
            each.prompt,
            **start,
            negative_prompt=each.negative_prompt,
            generator=[torch.Generator().manual_seed(each.seed)],
            **each.arguments,
        )
    finally:
        pipeline.scheduler = own
    return np.asarray(result.images[0], np.int16)


def test_twelve_mixed_requests_get_the_images_that_each_alone_gets(served: ServedPipeline) -> None:
    told: list[Message] = []
    run(Engine(lambda job: served, {"tiny": SECONDS}, told.append, places=6), MIXED, at_once=5)
    assert [each for each in told if isinstance(each, Failed)] == []
    batches = [batch for each in told if isinstance(each, Turned) for batch in each.batches]
    assert max(images for images, _, _ in batches) == 4
    runs = sum(each.total for each in told if isinstance(each, Stepped) and each.done == each.total)
    assert len(batches) < 0.6 * runs, "they share runs"
    drawn = {each.request: decoded(each.file) for each in told if isinstance(each, Drawn)}
    for each in sorted(MIXED, key=lambda each: (each.arguments["height"], each.arguments["guidance_scale"] > 1)):
        np.testing.assert_allclose(drawn[each.request], alone(served.base, each), atol=1, err_msg=each.request)


def test_a_new_request_joins_at_the_next_step_and_a_finished_one_leaves(served: ServedPipeline) -> None:
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": SECONDS}, told.append, places=4)
    engine.submit(job(0, arguments=call(3, 7.5)))
    engine.turn()
    engine.submit(job(1, arguments=call(3, 7.5)))
    while engine.busy:
        engine.turn()
    turns = [each.batches for each in told if isinstance(each, Turned) and each.batches]
    # PNDM takes one run more than there are steps.
    assert [[images for images, _, _ in batches] for batches in turns] == [[1], [2], [2], [2], [1]]
    # Their files are written elsewhere, each in its time.
    assert {each.request for each in told if isinstance(each, Drawn)} == {"request 0", "request 1"}


def test_images_that_share_runs_only_from_the_same_step_on_start_together_when_the_one_before_them_is_done(
    served: ServedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FLUX.2's and Z-Image's do. In turns, all would take longer, and none would share a run."""
    monkeypatch.setattr(served.shared_steps(8, 8), "one_time", True)
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": SECONDS}, told.append, places=4)
    for number in range(3):
        engine.submit(job(number, arguments=call(3, 7.5), scheduler="ddim"))
        if not number:
            engine.turn()
    while engine.busy:
        engine.turn()
    batches = [images for each in told if isinstance(each, Turned) for images, _, _ in each.batches]
    assert batches == [1, 1, 1, 2, 2, 2]


def test_a_small_image_waits_for_a_step_of_a_large_one_and_not_for_all_of_it(served: ServedPipeline) -> None:
    """One place for each size."""
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": {1: 1.0}}, told.append)
    large = call(12, 7.5, height=128, width=128)
    for number, arguments in enumerate((large, large, call(2, 7.5), call(2, 7.5))):
        engine.submit(job(number, arguments=arguments, scheduler="ddim"))
    while engine.busy:
        engine.turn()
    begun = [each.request for each in told if isinstance(each, Begun)]
    assert begun[:2] == ["request 0", "request 2"], "the second large one has no place yet"
    drawn = [each.request for each in told if isinstance(each, Drawn)]
    assert drawn == ["request 2", "request 3", "request 0", "request 1"]


def test_sizes_beyond_those_that_are_kept_wait_and_are_not_overtaken(served: ServedPipeline) -> None:
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": {1: 1.0}}, told.append)
    sides = (64, 128, 192, 256, 320, 64)
    for number, side in enumerate(sides):
        engine.submit(job(number, arguments=call(3, 7.5, height=side), scheduler="ddim"))
    engine.turn()
    assert [each for each in told if isinstance(each, Failed)] == []
    assert [each.request for each in told if isinstance(each, Begun)] == [f"request {number}" for number in range(4)]
    while engine.busy:
        engine.turn()
    begun = [each.request for each in told if isinstance(each, Begun)]
    assert begun.index("request 4") < begun.index("request 5"), "its size came first"
    assert len([each for each in told if isinstance(each, Drawn)]) == len(sides)


def test_what_is_cancelled_is_gone_at_the_next_step(served: ServedPipeline) -> None:
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": SECONDS}, told.append, places=2)
    for number in range(3):
        engine.submit(job(number, arguments=call(4, 7.5)))
    engine.turn()
    engine.cancel("request 0")
    engine.turn()
    assert [each.request for each in told if isinstance(each, Begun)] == ["request 0", "request 1", "request 2"]
    engine.cancel("request 1")
    engine.cancel("request 2")
    assert not engine.busy
    assert not [each for each in told if isinstance(each, Drawn | Failed)]


def test_one_that_fails_takes_no_other_along(served: ServedPipeline) -> None:
    told: list[Message] = []
    bad = job(1, arguments=call(3, 7.5, height=72))
    run(Engine(lambda job: served, {"tiny": SECONDS}, told.append), [job(0, arguments=call(3, 7.5)), bad], at_once=2)
    (failed,) = (each for each in told if isinstance(each, Failed))
    assert (failed.request, failed.kind) == ("request 1", "UsageError")
    assert "72 pixels" in failed.what
    assert [each.request for each in told if isinstance(each, Drawn)] == ["request 0"]


def test_a_batch_that_cannot_be_run_is_run_one_by_one(served: ServedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory is short: the larger batch fails, its images do not."""
    from sdflow.serve.engine.shared_steps import SharedSteps

    own = SharedSteps.run

    def short_of_memory(self: SharedSteps, steps: Sequence[Any], size: int) -> list[torch.Tensor]:
        if size > 1:
            raise RuntimeError("Failed to allocate memory for requested buffer")
        return own(self, steps, size)

    monkeypatch.setattr(SharedSteps, "run", short_of_memory)
    told: list[Message] = []
    jobs = [job(number, arguments=call(2, 7.5)) for number in range(2)]
    run(Engine(lambda job: served, {"tiny": SECONDS}, told.append), jobs, at_once=2)
    assert len([each for each in told if isinstance(each, Drawn)]) == 2


def test_previews_come_on_the_way_and_grow_like_the_image(served: ServedPipeline) -> None:
    told: list[Message] = []
    run(Engine(lambda job: served, {"tiny": SECONDS}, told.append), [job(0, arguments=call(6, 7.5), previews=3)], 1)
    files = [each.file for each in told if isinstance(each, Preview)]
    (final,) = (each.file for each in told if isinstance(each, Drawn))
    images = [decoded(file) for file in (*files, final)]
    distances = [float(np.abs(image - images[-1]).mean()) for image in images]
    assert len(files) == 3
    assert distances[0] > distances[1] > distances[2] > 0


@pytest.mark.parametrize(
    ("previews", "runs", "steps"), [(0, 5, ()), (1, 4, (1,)), (3, 8, (1, 3, 5)), (3, 2, (0,)), (2, 1, ())]
)
def test_previews_are_spread_evenly(previews: int, runs: int, steps: tuple[int, ...]) -> None:
    assert preview_steps(previews, runs) == steps


def test_loras_go_together_and_none_waits_for_ever(served: ServedPipeline) -> None:
    """One place for two kinds of requests. Those with the LoRA that is being drawn go first, but only so many."""
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": SECONDS}, told.append, places=2)
    ink = (LoraFile("ink", "ink.safetensors", "0", 1.0),)
    short = call(1, 7.5)
    engine.submit(job(0, arguments=call(12, 7.5), scheduler="ddim", loras=ink))
    engine.submit(job(1, arguments=short, scheduler="ddim"))
    for number in range(2, 9):
        engine.submit(job(number, arguments=short, scheduler="ddim", loras=ink))
    while engine.busy:
        engine.turn()
    begun = [int(each.request.split()[1]) for each in told if isinstance(each, Begun)]
    assert begun == [0, 2, 3, 4, 5, 1, 6, 7, 8]


def test_whose_pipeline_is_still_being_made_holds_nobody_up_and_is_next_then(served: ServedPipeline) -> None:
    """One place. The oldest wants a LoRA that is not there yet; the next with another is made when that one has begun."""
    told: list[Message] = []
    there, asked = {()}, []

    def ready(job: Job, begin: bool) -> bool:
        if begin and job.loras not in there:
            asked.append(job.loras[0].name)
        return job.loras in there

    engine = Engine(lambda job: served, {"tiny": {1: 1.0}}, told.append, ready=ready)
    ink, oil = ((LoraFile(name, f"{name}.safetensors", "0", 1.0),) for name in ("ink", "oil"))
    for number, loras in enumerate((ink, oil, (), (), ())):
        engine.submit(job(number, arguments=call(1, 7.5), scheduler="ddim", loras=loras))

    def begun() -> list[int]:
        return [int(each.request.split()[1]) for each in told if isinstance(each, Begun)]

    engine.turn()
    engine.turn()
    assert (begun(), set(asked)) == ([2, 3], {"ink"})
    there.add(ink)
    engine.turn()
    assert begun() == [2, 3, 0]
    engine.turn()
    assert (begun(), set(asked)) == ([2, 3, 0, 4], {"ink", "oil"})
    while engine.turn():  # the images end elsewhere, each in its time
        assert begun() == [2, 3, 0, 4]
    assert engine.busy, "it waits for the last one's LoRA alone"
    engine.cancel("request 1")
    assert not engine.busy


def test_what_waits_is_told_while_all_of_it_is_being_made(served: ServedPipeline) -> None:
    told: list[Message] = []
    engine = Engine(lambda job: served, {"tiny": {1: 1.0}}, told.append, ready=lambda job, begin: False)
    engine.submit(job(0))
    for _ in range(3):
        engine.turn()
    engine.submit(job(1))
    engine.turn()
    engine.cancel("request 0")
    engine.cancel("request 1")
    engine.turn()
    assert [(each.drawing, each.waiting) for each in told if isinstance(each, Turned)] == [(0, 1), (0, 2), (0, 0)]
