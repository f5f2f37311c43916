"""The worker's pipelines in all lanes: loaded, unloaded when memory is short, added and removed while images run.

One pipeline loads at a time: on a CPU in a background thread, on a GPU in the lane's thread, because the lane's stream
may be capturing a graph. If not all pipelines may stay loaded, the least recently used one is unloaded once none of its
images are running. It takes no new images until its replacement is loaded, so that neither waits forever.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, RLock
from typing import Any

from sdflow.errors import SdflowError, UsageError
from sdflow.machine.memory import trim
from sdflow.serve.engine import loading
from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.lanes import Lanes
from sdflow.serve.engine.loading import LoadedLane, Room, folder_bytes, measured_seconds, warm
from sdflow.serve.engine.pace import Pace
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.jobs import Drop, Failed, Job, Load, Loaded, Message, WorkerOptions
from sdflow.serve.log import log_error, log_line
from sdflow.serve.loras.live_loras import SharedValues
from sdflow.serve.worker.ready_pipelines import ReadyPipelines

IDLE_SECONDS = 0.05
"""Polling interval while a pipeline to be unloaded is still in use."""

REMOVED = "its pipeline was removed"


@dataclass
class _Lane:
    loaded: LoadedLane
    ready: dict[str, ReadyPipelines] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)


class Stock:
    """The pipelines of a worker.

    loaded: the lanes, with some of the pipelines. tell: receives the results of loading.
    """

    def __init__(self, options: WorkerOptions, loaded: list[LoadedLane], tell: Callable[[Message], None]) -> None:
        self._options, self._tell = options, tell
        self.room = Room.measured(loaded[0])
        self.lanes = Lanes(tell, self.room.share)
        self._folders = {name: options.pipelines[name] for name in loaded[0].pipelines}
        self._used: list[str] = []
        self._leaving: set[str] = set()
        self._coming: Future[None] | None = None
        self._adding = self._is_loading = False
        self._newest: dict[str, Load | Drop] = {}
        self._problems: dict[str, Exception] = {}
        self._told: dict[str, Exception] = {}
        self._lock, self._measuring = RLock(), Lock()
        self._pool = ThreadPoolExecutor(1, "pipelines")
        self._on_cpu = all(each.base.place.stream is None for each in loaded[0].pipelines.values())
        self._lanes = [_Lane(each) for each in loaded]
        for name in list(loaded[0].pipelines):
            self._keep(name, [each.pipelines[name] for each in loaded], [each.seconds[name] for each in loaded])
        for lane in self._lanes:
            self.lanes.add(partial(self._engine, lane), partial(self._rest, lane), partial(self._idle, lane))

    def _engine(self, lane: _Lane, waiting: Waiting, tell: Callable[[Message], None]) -> Engine:
        ready = partial(self.is_ready, lane)
        return Engine(partial(self.find, lane), lane.paces, tell, ready=ready, waiting=waiting)

    def about(self, name: str) -> Mapping[str, Any]:
        """Return what was measured when a pipeline was loaded."""
        first = self._lanes[0]
        return {
            "batch_seconds": dict(first.paces[name].seconds),
            "alone": first.loaded.pipelines[name].why_alone,
            "lanes": len(self._lanes),
            "max_pixels": self.room.most[name],
            "pixels": self.room.own[name],
        }

    @property
    def loading(self) -> bool:
        """Whether images may be waiting for a pipeline."""
        return self._is_loading or self._is_bringing

    @property
    def _is_bringing(self) -> bool:
        return self._coming is not None and not self._coming.done()

    def submit(self, job: Job) -> None:
        """Queue a job. If its pipeline was removed, the job fails."""
        with self.lanes.waiting.changed:  # keeps the pipeline from being removed in between
            if job.pipeline in self._folders:
                self.lanes.submit(job)
                return
        self._tell(Failed(job.request, job.index, "UsageError", REMOVED, "model"))

    def do(self, order: Load | Drop) -> None:
        """Execute an order while images run, and report the result. The newest order for a name wins."""
        self._newest[order.name] = order
        self._begin(order)

    def forget(self, lora: str) -> None:
        """Release weights with this LoRA file; images that are running with it finish."""
        self._do(partial(self._forget, lora))

    def _begin(self, order: Load | Drop) -> None:
        self._do(partial(self._add, order) if isinstance(order, Load) else partial(self._drop, order))

    def _do(self, work: Callable[[], None]) -> None:
        """Run in the background; on a GPU between two steps, because it would break a graph capture."""
        if self._on_cpu:
            self._pool.submit(work)
        else:
            self.lanes.do(work)

    def is_ready(self, lane: _Lane, job: Job, begin: bool) -> bool:
        """Whether `find` returns without waiting. begin: if not, start loading."""
        with self._lock:
            name = job.pipeline
            if name not in self._folders:
                self._problems[name] = UsageError(REMOVED, where="model")
                return True
            if begin and not self._adding and not self._is_bringing:
                self._leaving.discard(name)  # the older job that it made room for was cancelled
            found = None if name in self._leaving else lane.ready.get(name)
            if found is None:
                if begin and name not in {*self._problems, *self._leaving}:
                    self._bring(name)
                return name in self._problems
            if begin:
                self._used.remove(name)
                self._used.append(name)
        return found.ready(job, begin=begin)

    def find(self, lane: _Lane, job: Job) -> ServedPipeline:
        """Return the pipeline for a job. Raises the error that kept it from loading."""
        with self._lock:
            if problem := self._problems.pop(job.pipeline, None):
                self._told[job.pipeline] = problem
                raise problem
            found = lane.ready.get(job.pipeline)
            if found is None:  # another lane took the error
                raise self._told.get(job.pipeline) or UsageError(REMOVED, where="model")
        return found.find(job)

    def load_others(self) -> dict[str, Mapping[str, Any]]:
        """Load each remaining pipeline once, unloading others for room. Return the measurements of all. Raises like
        loading."""
        known = {name: self.about(name) for name in self._used}
        for name, folder in self._options.pipelines.items():
            if name not in known:
                self._folders[name] = folder
                while not self._make_room(name):
                    continue
                self._load(name)
                known[name] = self.about(name)
        return known

    def _bring(self, name: str) -> None:
        """Load a pipeline once there is room. Called repeatedly until it is loaded."""
        if self._is_bringing or not self._make_room(name):
            return
        if self._on_cpu:
            self._coming = self._pool.submit(self._load_or_note, name)
            self._coming.add_done_callback(lambda done: self.lanes.look_again())
        else:
            self._load_or_note(name)

    def _make_room(self, name: str) -> bool:
        """Whether there is room for one more. Each call unloads at most the least recently used one, if it is not
        running."""
        most, wanted = self._options.memory, {*self._used, name}
        if most is None or not self._used:
            return True
        if len(self._lanes) * sum(folder_bytes(self._folders[each]) for each in wanted) <= most:
            return True
        oldest = self._used[0]
        self._leaving.add(oldest)
        if oldest not in self.lanes.waiting.pipelines:
            self._unload(oldest)
        return False

    def _load_or_note(self, name: str) -> None:
        try:
            self._load(name)
        except Exception as error:  # noqa: BLE001  (reported to the job that needs it)
            self._problems[name] = error
        self._leaving.clear()

    def _load(self, name: str) -> None:
        """Load a pipeline in every lane, replacing one of the same name. Raises UsageError on a GPU with several
        lanes."""
        folder, begun, made = self._folders[name], time.perf_counter(), list[ServedPipeline]()
        self._is_loading = True
        try:
            for lane in self._lanes:
                made.append(loading.load(folder, lane.loaded.threads, self._options))
                if made[-1].base.place.stream is not None and len(self._lanes) > 1:
                    raise UsageError(
                        f"{name} runs on a GPU, which supports only one lane; this server's CPU pipelines use {len(self._lanes)}",
                        remedy="Serve it separately, or start this server with --lanes 1.",
                    )
            seconds = [warm(name, each, self._options) for each in made]
        finally:
            self._is_loading = False
        self.room.add(name, made[0])
        self._keep(name, made, seconds)
        log_line("loaded", pipeline=name, seconds=round(time.perf_counter() - begun, 2))

    def _keep(self, name: str, made: list[ServedPipeline], seconds: Sequence[Mapping[int, float]]) -> None:
        """Use these pipelines for new jobs, in all lanes at the same moment."""
        options, values, kept = self._options, SharedValues(), list[tuple[ReadyPipelines, Pace]]()
        memory = options.lora_memory // len(self._lanes)
        for pipeline, measured in zip(made, seconds, strict=True):
            pipeline.keep_sizes(self.room.most[name] // len(made))
            found = ReadyPipelines(self._folders[name], pipeline, options.cache, memory, values, self.lanes.look_again)
            if options.loras:
                job = loading.warm_up_job(name, pipeline)
                found.prepare(job, list(measured), partial(warm, name, options=options))
            again = options.batch_sizes is None and pipeline.why_alone is None
            kept.append((found, Pace(measured, again=again)))
        with self._lock:
            for lane, pipeline, (found, pace) in zip(self._lanes, made, kept, strict=True):
                lane.loaded.pipelines[name], lane.paces[name], lane.ready[name] = pipeline, pace, found
            self._used = [*(each for each in self._used if each != name), name]
            self._problems.pop(name, None)
            self._told.pop(name, None)

    def _unload(self, name: str) -> None:
        with self._lock:
            for lane in self._lanes:
                lane.ready.pop(name).close()
                del lane.loaded.pipelines[name]
            self._used.remove(name)
        _free()
        log_line("unloaded", pipeline=name)

    def _forget(self, lora: str) -> None:
        with self._lock:
            every = [ready for lane in self._lanes for ready in lane.ready.values()]
        for each in every:
            each.forget(lora)
        _free()

    def _rest(self, lane: _Lane) -> None:
        """Release what a lane's large images used."""
        with self._lock:
            every = list(lane.ready.values())
        for each in every:
            each.rest()
        _free()

    def _idle(self, lane: _Lane, busy: Callable[[], bool]) -> bool:
        """Create the batch sizes that images lacked, and measure them again if images had to wait. Return whether it
        was done before there were new images."""
        with self._lock:
            every = [(name, ready, lane.paces[name]) for name, ready in lane.ready.items()]
        if not self._measuring.acquire(blocking=False):  # lanes would slow each other down
            return False

        def stops() -> bool:
            return self.loading or busy()

        try:
            for name, ready, pace in every:
                if not ready.catch_up(stops):
                    return False
                if pace.due:
                    seconds = measured_seconds(ready.base, busy=stops)
                    if stops() or not seconds:
                        return False
                    pace.measured(seconds)
                    log_line("measured", pipeline=name, batch_seconds=seconds)
        finally:
            self._measuring.release()
        return True

    def _add(self, order: Load) -> None:
        before, found, said = self._folders.get(order.name), None, "it was removed while it was loading"
        if self._newest[order.name] is order:
            self._folders[order.name], self._adding = order.folder, True
            try:
                if not self._make_room(order.name):
                    self._do_again(order)
                    return
                self._adding = False
                self._load(order.name)
                found, said = self.about(order.name), ""
            except Exception as error:  # noqa: BLE001  (reported; other pipelines continue)
                said = error.what if isinstance(error, SdflowError) else f"{type(error).__name__}: {error}"
                if not isinstance(error, SdflowError):
                    log_error(error)
                if before is None:
                    del self._folders[order.name]
                else:
                    self._folders[order.name] = before
        self._tell(Loaded(order.name, order.folder, found, said, order.number))
        self._leaving.clear()
        self._adding = False
        self.lanes.look_again()

    def _drop(self, order: Drop) -> None:
        if self._newest[order.name] is not order:
            return  # it was added again
        waiting = self.lanes.waiting
        with waiting.changed:
            drawn = order.name in waiting.pipelines or any(job.pipeline == order.name for job in waiting.jobs)
            if not drawn:
                if order.name in self._used:
                    self._unload(order.name)
                self._folders.pop(order.name, None)
        if drawn:
            self._do_again(order)

    def _do_again(self, order: Load | Drop) -> None:
        """Retry once running images have advanced; on a GPU this is the thread that runs them."""
        if self._on_cpu:
            time.sleep(IDLE_SECONDS)
        self._begin(order)


def _free() -> None:
    """Return freed memory to the system."""
    gc.collect()
    trim()
