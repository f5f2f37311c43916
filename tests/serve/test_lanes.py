"""Several lanes draw side by side from one queue, and give what one alone gives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from until import PATIENCE, until

from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.lanes import Lanes, Tell
from sdflow.serve.engine.loading import LoadedLane, load_lanes
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.jobs import (
    Begun,
    Drawn,
    Drop,
    Failed,
    Job,
    Load,
    Loaded,
    LoraFile,
    Message,
    Turned,
    WorkerOptions,
)
from sdflow.serve.loras.live_loras import SharedValues, Values
from sdflow.serve.worker.stock import Stock

Kind = TypeVar("Kind")


@pytest.fixture(scope="module")
def loaded(tiny_pipeline: Path) -> list[LoadedLane]:
    return load_lanes(WorkerOptions({"tiny": tiny_pipeline}, batch_sizes=(1,), threads=2, lanes=2))


def job(number: int, steps: int = 2, size: int = 64) -> Job:
    arguments = {"height": size, "width": size, "num_inference_steps": steps}
    return Job(f"request {number}", 0, "tiny", f"thing number {number}", seed=number, arguments=arguments)


class Running:
    """Lanes in a thread of their own, and what they told. find: gives the pipeline of a job, by the number of the lane."""

    def __init__(self, loaded: list[LoadedLane], find: Callable[[int, Job], ServedPipeline]) -> None:
        self.told: list[Message] = []
        self._heard = threading.Condition()
        self.lanes = Lanes(self._hear)
        for number, lane in enumerate(loaded):
            self.lanes.add(partial(self._engine, partial(find, number), lane))
        self._thread = threading.Thread(target=self.lanes.run, daemon=True)
        self._thread.start()

    @staticmethod
    def _engine(find: Callable[[Job], ServedPipeline], lane: LoadedLane, waiting: Waiting, tell: Tell) -> Engine:
        return Engine(find, lane.seconds, tell, waiting=waiting)

    def _hear(self, message: Message) -> None:
        with self._heard:
            self.told.append(message)
            self._heard.notify_all()

    def wait_for(self, true: Callable[[list[Message]], bool]) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: true(self.told), PATIENCE), self.told

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [each for each in self.told if isinstance(each, kind)]

    def end(self) -> None:
        self.lanes.end()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_two_are_drawn_at_the_same_time_and_give_what_each_alone_gives(loaded: list[LoadedLane]) -> None:
    together = threading.Barrier(2, timeout=PATIENCE)

    def find(number: int, job: Job) -> ServedPipeline:
        if job.request in ("request 0", "request 1"):
            together.wait()  # nobody goes on before both have begun, which one lane alone cannot
        return loaded[number].pipelines["tiny"]

    running = Running(loaded, find)
    for number in range(4):
        running.lanes.submit(job(number))
    running.wait_for(lambda told: sum(isinstance(each, Drawn) for each in told) == 4)
    running.end()
    assert max(each.drawing for each in running.of(Turned)) <= 2
    for number in range(4):
        said: list[Message] = []
        engine = Engine(lambda job: loaded[1].pipelines["tiny"], {"tiny": {1: 1.0}}, said.append)
        engine.submit(job(number))
        while engine.busy:
            engine.turn()
        (alone,) = (each for each in said if isinstance(each, Drawn))
        (found,) = (each for each in running.of(Drawn) if each.request == f"request {number}")
        assert found.file == alone.file


def test_what_is_cancelled_ends_in_the_lane_that_draws_it_and_in_the_queue(loaded: list[LoadedLane]) -> None:
    running = Running(loaded, lambda number, job: loaded[number].pipelines["tiny"])
    for number in range(3):
        running.lanes.submit(job(number, steps=900, size=256))  # for longer than anything here may take
    running.wait_for(lambda told: sum(isinstance(each, Begun) for each in told) == 2)
    for number in range(3):
        running.lanes.cancel(f"request {number}")
    running.lanes.submit(job(3))
    running.wait_for(lambda told: any(isinstance(each, Drawn) for each in told))
    running.end()
    assert [each.request for each in running.of(Drawn)] == ["request 3"]


def test_each_lane_has_sessions_of_its_own_with_its_part_of_the_threads(loaded: list[LoadedLane]) -> None:
    first, second = (lane.pipelines["tiny"].base.submodels for lane in loaded)
    for name in ("text_encoder", "vae_decoder"):
        assert first[name].session is not second[name].session
        assert first[name].session.get_session_options().intra_op_num_threads == 1


def test_there_is_one_lane_by_default_and_the_sizes_of_its_batches_are_measured(tiny_pipeline: Path) -> None:
    (lane,) = load_lanes(WorkerOptions({"tiny": tiny_pipeline}, threads=1))
    assert 1 in lane.seconds["tiny"] and all(taken > 0 for taken in lane.seconds["tiny"].values())


def test_values_that_several_lanes_want_are_computed_once_and_failures_are_tried_again() -> None:
    values, asked = SharedValues(), []
    loras = (LoraFile("ink", "ink.safetensors", "0", 1.0),)
    begun, go_on = threading.Event(), threading.Event()

    def compute() -> Values:
        asked.append(1)
        begun.set()
        assert go_on.wait(PATIENCE)
        return Values(unet={})

    found: list[Values] = []
    first = threading.Thread(target=lambda: found.append(values.get(loras, compute)))
    first.start()
    assert begun.wait(PATIENCE)
    second = threading.Thread(target=lambda: found.append(values.get(loras, compute)))
    second.start()
    go_on.set()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert len(asked) == 1 and found[0] is found[1]
    del found[:]

    def fail() -> Values:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        values.get(loras, fail)
    assert values.get(loras, lambda: Values(unet={"a": {}})) == {"unet": {"a": {}}}


def test_the_newest_order_for_a_pipeline_counts(loaded: list[LoadedLane], tiny_pipeline: Path) -> None:
    """Removed while it is drawn, and added again before that has an effect, it is there; an image of none fails alone."""
    told: list[Message] = []
    lane = LoadedLane(dict(loaded[0].pipelines), dict(loaded[0].seconds), loaded[0].first, loaded[0].threads)
    stock = Stock(WorkerOptions({"tiny": tiny_pipeline}, batch_sizes=(1,), threads=2, lanes=1), [lane], told.append)
    thread = threading.Thread(target=stock.lanes.run, daemon=True)
    thread.start()
    stock.submit(job(0, steps=40, size=128))
    until(lambda: any(isinstance(each, Begun) for each in told))
    for order in (Drop("tiny"), Load("tiny", tiny_pipeline, 7)):
        stock.do(order)
    until(lambda: any(isinstance(each, Loaded) and each.number == 7 for each in told))
    until(lambda: sum(isinstance(each, Drawn) for each in told) == 1)
    stock._pool.submit(lambda: None).result(PATIENCE)
    stock.submit(job(1))
    until(lambda: sum(isinstance(each, Drawn) for each in told) == 2)
    stock.do(Drop("tiny"))
    until(lambda: "tiny" not in stock._folders)
    stock.submit(job(2))
    (failed,) = (each for each in told if isinstance(each, Failed))
    assert (failed.kind, failed.request) == ("UsageError", "request 2")
    stock.lanes.end()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_memory_of_large_images_is_given_back(loaded: list[LoadedLane], tiny_pipeline: Path) -> None:
    """Their sessions are gone, and the decoder's, which held it; the next image is the same."""
    pipeline, told = loaded[0].pipelines["tiny"], list[Message]()
    engine = Engine(lambda job: pipeline, {"tiny": {1: 1.0}}, told.append)

    def drawn(size: int) -> bytes:
        engine.submit(job(7, size=size))
        while engine.busy:
            engine.turn()
        return next(each.file for each in reversed(told) if isinstance(each, Drawn))

    before = drawn(64)
    drawn(320)
    decoder = pipeline.base.submodels["vae_decoder"]
    large, own = decoder.session, weakref.ref(pipeline.shared_steps(40, 40))
    pipeline.rest()
    gc.collect()
    assert own() is None and decoder.session is not large
    assert drawn(64) == before
