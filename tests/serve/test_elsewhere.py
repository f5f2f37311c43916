"""What comes behind an image's last step keeps no other image waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
from until import PATIENCE

from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.engine import served_pipeline
from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.jobs import Drawn, Failed, Job, Message


@pytest.fixture(scope="module")
def served(tiny_pipeline: Path) -> ServedPipeline:
    return ServedPipeline(Pipeline.load(tiny_pipeline, "cpu", threads=1))


def job(number: int) -> Job:
    arguments = {"height": 64, "width": 64, "num_inference_steps": 1}
    return Job(f"request {number}", 0, "tiny", "a thing", number, arguments=arguments, scheduler="ddim")


class Held:
    """In the place of what writes files: that of `request 0` waits until it is let go, and fails if it is told to."""

    def __init__(self, fails: str | None = None) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._own, self._fails = served_pipeline.encoded, fails

    def __call__(self, image: PIL.Image.Image, job: Job) -> bytes:
        if job.request == "request 0":
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
            if self._fails is not None:
                raise OSError(self._fails)
        return self._own(image, job)


def two(served: ServedPipeline, told: list[Message]) -> Engine:
    """An engine with one place, and two that want it."""
    engine = Engine(lambda job: served, {"tiny": {1: 1.0}}, told.append)
    for number in range(2):
        engine.submit(job(number))
    return engine


def turn_until(engine: Engine, true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it does not come"
        engine.turn()


def drawn(told: list[Message]) -> list[str]:
    return [each.request for each in told if isinstance(each, Drawn)]


def test_the_next_is_drawn_while_a_file_is_written(served: ServedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Message] = []
    held = Held()
    monkeypatch.setattr(served_pipeline, "encoded", held)
    engine = two(served, told)
    turn_until(engine, lambda: bool(drawn(told)))
    assert (drawn(told), held.begun.wait(PATIENCE), engine.busy) == (["request 1"], True, True)
    held.go_on.set()
    turn_until(engine, lambda: not engine.busy)
    assert drawn(told) == ["request 1", "request 0"]


def test_a_file_that_cannot_be_written_fails_its_image_alone(
    served: ServedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Message] = []
    held = Held("no such codec")
    held.go_on.set()
    monkeypatch.setattr(served_pipeline, "encoded", held)
    engine = two(served, told)
    turn_until(engine, lambda: not engine.busy)
    assert drawn(told) == ["request 1"]
    assert [(each.request, each.what) for each in told if isinstance(each, Failed)] == [("request 0", "no such codec")]


def test_what_is_cancelled_while_its_file_is_written_is_not_told(
    served: ServedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Message] = []
    held = Held()
    monkeypatch.setattr(served_pipeline, "encoded", held)
    engine = two(served, told)
    turn_until(engine, lambda: bool(drawn(told)))
    engine.cancel("request 0")
    assert not engine.busy
    held.go_on.set()
    assert drawn(told) == ["request 1"]
