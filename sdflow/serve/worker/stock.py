"""The pipelines of the process that draws, in all its lanes: loaded, unloaded where memory is short, added and removed, while
others are drawn.

One is loaded at a time: on the CPU in a thread beside the lanes; on a GPU by the lane, whose stream may be captured. Where the
files of all are more than may stay loaded, those that were asked for longest ago make room once nothing of them is drawn; they
take no new images until what they make room for is loaded, so that neither waits for ever.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from sdflow.errors import SdflowError
from sdflow.machine.memory import trim
from sdflow.serve.engine.lanes import Lanes
from sdflow.serve.engine.loading import LoadedLane, Room, load, warm, warm_up_job
from sdflow.serve.engine.pace import Pace
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.engine.shared_steps import SharedSteps
from sdflow.serve.jobs import Drop, Job, Load, Loaded, Message, WorkerOptions
from sdflow.serve.log import log_line
from sdflow.serve.loras.live_loras import SharedValues
from sdflow.serve.worker.ready_pipelines import ReadyPipelines

IDLE_SECONDS = 0.05
"""Between two looks whether a pipeline is drawn that is to be unloaded."""


class Stock:
    """loaded: the lanes, with some of the pipelines. tell: receives what becomes of those that are added."""

    def __init__(self, options: WorkerOptions, loaded: list[LoadedLane], tell: Callable[[Message], None]) -> None:
        self._options, self._loaded, self._tell = options, loaded, tell
        self.room = Room.measured(loaded)
        self.lanes = Lanes(tell, self.room.share, self._rest)
        self._folders: dict[str, Path] = {}
        self._ready: list[dict[str, ReadyPipelines]] = [{} for _ in loaded]
        self._used: list[str] = []
        self._leaving: set[str] = set()
        self._coming: Future[None] | None = None
        self._problems: dict[str, Exception] = {}
        self._lock = RLock()
        self._pool = ThreadPoolExecutor(1, "pipelines")
        self._on_cpu = all(each.base.place.stream is None for each in loaded[0].pipelines.values())
        for name in loaded[0].pipelines:
            self._folders[name] = options.pipelines[name]
            self._keep(name, [lane.pipelines[name] for lane in loaded], [lane.seconds[name] for lane in loaded])

    def about(self, name: str) -> Mapping[str, Any]:
        """What was found out about a pipeline when it was loaded."""
        pace = self._loaded[0].seconds[name]
        return {
            "batch_seconds": dict(pace.seconds if isinstance(pace, Pace) else pace),
            "alone": self._loaded[0].pipelines[name].why_alone,
            "lanes": len(self._loaded),
            "max_pixels": self.room.most[name],
            "pixels": self.room.own[name],
        }

    def do(self, order: Load | Drop) -> None:
        """While others are drawn. What becomes of it is told."""
        work = partial(self._add if isinstance(order, Load) else self._drop, order)
        if self._on_cpu:
            self._pool.submit(work)
        else:
            self.lanes.do(work)

    def is_ready(self, lane: int, job: Job, begin: bool) -> bool:
        """Whether `find` has nothing to wait for. begin: if it has, that is begun."""
        with self._lock:
            if begin and (self._coming is None or self._coming.done()):
                self._leaving.discard(job.pipeline)  # what it made room for was older, and is not wanted any more
            found = None if job.pipeline in self._leaving else self._ready[lane].get(job.pipeline)
            if found is None:
                if begin and job.pipeline not in {*self._problems, *self._leaving}:
                    self._bring(job.pipeline)
                return job.pipeline in self._problems
            if begin:
                self._used.remove(job.pipeline)
                self._used.append(job.pipeline)
        return found.ready(job, begin=begin)

    def find(self, lane: int, job: Job) -> ServedPipeline:
        """Raises what kept it from being loaded."""
        with self._lock:
            if problem := self._problems.pop(job.pipeline, None):
                raise problem
            found = self._ready[lane][job.pipeline]
        return found.find(job)

    def load_others(self) -> dict[str, Mapping[str, Any]]:
        """What is known of all pipelines, those included that there is no room for: these are loaded once. Raises as loading."""
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
        """Load one, once there is room. Asked again until it is there."""
        if self._coming is None or self._coming.done():
            if not self._make_room(name):
                return
            if self._on_cpu:
                self._coming = self._pool.submit(self._load_or_note, name)
                self._coming.add_done_callback(lambda done: self.lanes.look_again())
            else:
                self._load_or_note(name)

    def _make_room(self, name: str) -> bool:
        """Whether there is room for one more; unloads, one at each call, what was asked for longest ago and is not drawn."""
        most = self._options.memory
        if most is None or not self._used or sum(map(self._size, {*self._used, name})) <= most:
            return True
        oldest = self._used[0]
        self._leaving.add(oldest)
        if oldest not in self.lanes.waiting.pipelines:
            self._unload(oldest)
        return False

    def _size(self, name: str) -> int:
        return len(self._loaded) * sum(
            path.stat().st_size for path in self._folders[name].resolve().glob("*/*") if path.is_file()
        )

    def _load_or_note(self, name: str) -> None:
        try:
            self._load(name)
        except Exception as error:  # noqa: BLE001  (whoever asked for it is told)
            self._problems[name] = error
        self._leaving.clear()

    def _load(self, name: str) -> None:
        """In every lane; in the place of the one that is there, if there is one."""
        folder, begun = self._folders[name], time.perf_counter()
        made = [load(folder, lane.threads, self._options) for lane in self._loaded]
        self._keep(name, made, [warm(name, each, self._options) for each in made])
        self.room.add(name, made)
        log_line("loaded", pipeline=name, seconds=round(time.perf_counter() - begun, 2))

    def _keep(self, name: str, made: list[ServedPipeline], seconds: list[Mapping[int, float]]) -> None:
        options, values = self._options, SharedValues()
        for number, lane in enumerate(self._loaded):
            found = ReadyPipelines(
                self._folders[name],
                made[number],
                options.cache,
                options.lora_memory // len(self._loaded),
                values,
                self.lanes.look_again,
            )
            pace = _pace(made[number], seconds[number], again=options.batch_sizes is None)
            if options.loras:
                sizes = list(seconds[number])
                found.prepare(warm_up_job(name, made[number]), sizes, partial(warm, name, options=options))
            with self._lock:
                lane.pipelines[name], lane.seconds[name], self._ready[number][name] = made[number], pace, found
        with self._lock:
            self._used = [*(each for each in self._used if each != name), name]

    def _unload(self, name: str) -> None:
        with self._lock:
            for lane, ready in zip(self._loaded, self._ready, strict=True):
                ready.pop(name).close()
                del lane.pipelines[name]
            self._used.remove(name)
        gc.collect()
        trim()
        log_line("unloaded", pipeline=name)

    def _rest(self, lane: int) -> None:
        """Give back what the large images of a lane took."""
        with self._lock:
            every = list(self._ready[lane].values())
        for each in every:
            each.rest()
        gc.collect()
        trim()

    def _add(self, order: Load) -> None:
        before = self._folders.get(order.name)
        self._folders[order.name] = order.folder
        try:
            while not self._make_room(order.name):
                time.sleep(IDLE_SECONDS)
            self._load(order.name)
        except Exception as error:  # noqa: BLE001  (it is told, and the others go on)
            said = error.what if isinstance(error, SdflowError) else f"{type(error).__name__}: {error}"
            if before is None:
                del self._folders[order.name]
            else:
                self._folders[order.name] = before
            self._tell(Loaded(order.name, order.folder, None, said))
        else:
            self._tell(Loaded(order.name, order.folder, self.about(order.name)))
        finally:
            self._leaving.clear()
            self.lanes.look_again()

    def _drop(self, order: Drop) -> None:
        waiting = self.lanes.waiting
        with waiting.changed:
            drawn = order.name in waiting.pipelines or any(job.pipeline == order.name for job in waiting.jobs)
            if not drawn:
                if order.name in self._used:
                    self._unload(order.name)
                self._folders.pop(order.name, None)
        if drawn:
            time.sleep(IDLE_SECONDS if self._on_cpu else 0)
            self.do(order)


def _pace(pipeline: ServedPipeline, seconds: Mapping[int, float], *, again: bool) -> Pace:
    def steps() -> SharedSteps | None:
        side = pipeline.base.latents.size
        return pipeline.shared_steps(side, side)

    def forget(size: int) -> None:
        if found := steps():
            found.forget(size)

    return Pace(seconds, again=again and pipeline.why_alone is None, forget=forget)
