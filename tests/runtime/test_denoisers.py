"""Which denoisers in parts are kept: the latest used, as many as fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdflow.runtime.denoiser import denoisers
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.submodel import Submodel

SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"}
HALF = {"from": 0.0, "to": 0.5}


@pytest.fixture
def pipeline(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Submodel]]:
    """Grows with each session of a part that is created."""
    found: list[Submodel] = []
    create = Submodel.part_session

    def counted(self: Submodel, *args: Any, **options: Any) -> Any:
        found.append(self)
        return create(self, *args, **options)

    monkeypatch.setattr(Submodel, "part_session", counted)
    yield found


def draw(pipeline: Pipeline, side: int, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return pipeline("a horse", height=side, width=side, generator=generator, **SETTINGS, **more).images


def test_two_sizes_with_guidance_in_some_steps_alternated_build_each_session_once(
    pipeline: Pipeline, made: list[Submodel]
) -> None:
    first = [draw(pipeline, side, guidance_interval=HALF) for side in (64, 128)]
    sessions = len(made)
    assert sessions == 2 * 2 * 3, "of text, timestep and step; with guidance and without; of two sizes"
    for _ in range(2):
        again = [draw(pipeline, side, guidance_interval=HALF) for side in (64, 128)]
        assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert len(made) == sessions


def test_without_free_memory_those_of_the_present_image_alone_are_kept(
    pipeline: Pipeline, made: list[Submodel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoisers, "available_bytes", lambda device: 0)
    expected = draw(pipeline, 64, guidance_interval=HALF)
    pair = set(pipeline.denoisers.kept)
    assert len(pair) == 2
    draw(pipeline, 128)
    assert len(pipeline.denoisers.kept) == 1 and not pair & set(pipeline.denoisers.kept)
    assert (draw(pipeline, 64, guidance_interval=HALF) == expected).all()
    assert set(pipeline.denoisers.kept) == pair


def test_the_one_that_was_not_used_for_the_longest_time_goes_first(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in (64, 128):
        draw(pipeline, side)
    small, large = pipeline.denoisers.kept
    draw(pipeline, 64)
    assert list(pipeline.denoisers.kept) == [large, small]
    taken = dict(pipeline.denoisers._taken)  # room for the small one and what comes, not for the large one
    new = pipeline.denoisers._bytes((1, 4, 24, 24), {"batch": 2})
    free = (taken[small] + new) / denoisers.SHARE - sum(taken.values())
    monkeypatch.setattr(denoisers, "available_bytes", lambda device: int(free) + 1)
    draw(pipeline, 192)
    assert large not in pipeline.denoisers.kept and small in pipeline.denoisers.kept


def test_a_drawing_goes_on_as_it_was_after_another_one_failed_to_begin(pipeline: Pipeline) -> None:
    """Both take turns in one denoiser; the other one's prompt was there already when it failed."""
    first, other = (
        pipeline.drawing(prompt, height=64, width=64, generator=torch.Generator().manual_seed(1), num_inference_steps=2)
        for prompt in ("a horse", "an otter in the rain")
    )
    assert first.denoiser is other.denoiser
    latents = first.latents()
    expected = first.denoiser.run(first.inputs, latents, 0).clone()
    assert not torch.equal(first.denoiser.run(other.inputs, latents, 0), expected)
    first.denoiser.run(first.inputs, latents, 0)
    broken = replace(other.inputs.schedule, timesteps=other.inputs.schedule.timesteps.bool())
    with pytest.raises(Exception, match=r"type|bool"):
        first.denoiser.run(replace(other.inputs, schedule=broken), latents, 0)
    assert torch.equal(first.denoiser.run(first.inputs, latents, 0), expected)
