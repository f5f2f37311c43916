"""Sessions of new batch sizes, which take seconds on a GPU, are created while no image waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from until import until

from sdflow.runtime.sessions.submodel import Submodel
from sdflow.serve.engine import lanes, shared_steps
from sdflow.serve.engine.loading import LoadedLane, load_lanes
from sdflow.serve.jobs import Drawn, Job, Message, Turned, WorkerOptions
from sdflow.serve.worker.stock import Stock

OWN, OTHER = 128, 64


class Served:
    """A worker's lane, what it told, and the sessions that it created of parts of the denoiser."""

    def __init__(self, options: WorkerOptions, loaded: LoadedLane) -> None:
        self.told: list[Message] = []
        self.stock = Stock(options, [loaded], self.told.append)
        self.sessions = 0
        self._submitted = 0
        self._thread = threading.Thread(target=self.stock.lanes.run, daemon=True)

    def count(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def part_session(submodel: Submodel, *given: Any, **more: Any) -> Any:
            self.sessions += 1
            return own(submodel, *given, **more)

        return part_session

    def draw(self, side: int, images: int, steps: int, scheduler: str = "ddim") -> None:
        """These images, all queued before the first one starts, until they are drawn."""
        size = {} if side == OWN else {"height": side, "width": side}
        with self.stock.lanes.waiting.changed:
            for number in range(self._submitted, self._submitted + images):
                arguments = {"num_inference_steps": steps, **size}
                self.stock.submit(Job(f"{number}", 0, "tiny", "a", number, scheduler=scheduler, arguments=arguments))
        self._submitted += images
        if not self._thread.is_alive():
            self._thread.start()
        until(lambda: sum(isinstance(each, Drawn) for each in self.told) == self._submitted)

    def batches(self, since: int = 0) -> set[int]:
        return {size for each in self.told[since:] if isinstance(each, Turned) for _, size, _ in each.batches}

    @property
    def sizes(self) -> Sequence[int]:
        return sorted(self.stock.about("tiny")["batch_seconds"])

    def end(self) -> None:
        self.stock.lanes.end()
        self._thread.join()


@pytest.fixture
def served(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that found at its start, in a busy moment, that only single images pay."""
    options = WorkerOptions({"tiny": tiny_pipeline}, threads=1, batch_sizes=(1,))
    (lane,) = load_lanes(options)
    made = Served(replace(options, batch_sizes=None), lane)
    monkeypatch.setattr(Submodel, "part_session", made.count(Submodel.part_session))
    yield made
    made.end()


def test_sizes_are_measured_again_while_no_image_waits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.draw(OWN, images=20, steps=8)
    assert (served.sessions, served.batches(), served.sizes) == (0, {1}, [1])
    monkeypatch.setattr(lanes, "IDLE_SECONDS", 0.05)
    served.draw(OWN, images=1, steps=1)
    until(lambda: served.sessions > 0 and not served.stock._lanes[0].paces["tiny"].due)
    created, since = served.sessions, len(served.told)
    served.draw(OWN, images=8, steps=3)
    assert served.sessions == created and served.batches(since) <= {*served.sizes}


def test_a_size_of_images_is_batched_once_the_server_was_idle(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.stock._lanes[0].paces["tiny"].measured({1: 1.0, 2: 1.1})
    served.draw(OTHER, images=4, steps=3)
    first = served.sessions
    assert served.batches() == {1}
    monkeypatch.setattr(lanes, "IDLE_SECONDS", 0.05)
    served.draw(OTHER, images=1, steps=1)
    until(lambda: served.sessions == first + 1)
    since = len(served.told)
    served.draw(OTHER, images=4, steps=3)
    assert served.sessions == first + 1 and served.batches(since) == {2}


def test_on_a_server_that_is_never_idle_images_that_lack_a_batch_long_enough_get_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_steps, "LACKED_RUNS", 4)
    served.stock._lanes[0].paces["tiny"].measured({1: 1.0, 2: 1.1})
    served.draw(OTHER, images=4, steps=5)
    assert served.batches() == {1, 2}
    own, runs = shared_steps.SharedSteps.run, 0

    def run(steps: shared_steps.SharedSteps, *given: Any) -> Any:
        nonlocal runs
        runs += 1
        return own(steps, *given)

    monkeypatch.setattr(shared_steps.SharedSteps, "run", run)
    assert served.stock._lanes[0].ready["tiny"].catch_up(lambda: False)
    assert runs == 0, "what has run is not run once more when the server is idle"
