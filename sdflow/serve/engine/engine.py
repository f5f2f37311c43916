"""The engine loop. Each turn advances a batch of images by one denoising step.

A turn starts queued images while places are free. It then runs one step for the group of same-sized images that has
used the least device time, the oldest first, as many as are fastest together. A new image thus joins at the next step,
and a small one waits for one step of a large one, not for all. Finishing an image (`elsewhere`) takes no place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from sdflow.errors import SdflowError
from sdflow.serve.engine.pace import Pace
from sdflow.serve.engine.running import Running
from sdflow.serve.engine.served_pipeline import ServedPipeline, Work, halves
from sdflow.serve.engine.shared_denoisers import SIZES_KEPT
from sdflow.serve.engine.shares import Shares
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.jobs import Begun, Failed, Job, LoraFile, Message, Show, Turned
from sdflow.serve.log import log_error, log_line

MOST_OVERTAKEN = 2
"""How many images may overtake a queued one, per place."""

SHORT = 0.1
"""Fraction of a step's time to wait for images with pending work."""

Batch = tuple[int, int, float]
"""(images, batch size, seconds)."""


class Engine:
    """Runs jobs.

    find: returns the pipeline for a job, with its LoRAs. ready: whether it is loaded; a true second argument starts
    loading. seconds: of a denoiser run by pipeline and batch size, fixed or updated; only these sizes are used. places:
    concurrent images of one size. tell: receives messages.
    """

    def __init__(
        self,
        find: Callable[[Job], ServedPipeline],
        seconds: Mapping[str, Mapping[int, float] | Pace],
        tell: Callable[[Message], None],
        places: int | None = None,
        ready: Callable[[Job, bool], bool] = lambda job, begin: True,
        waiting: Waiting | None = None,
    ) -> None:
        self._find, self._seconds, self._tell, self._ready = find, seconds, tell, ready
        self._places = places
        self._waiting = Waiting() if waiting is None else waiting
        self.submit = self._waiting.add
        self._running: list[Running] = []
        self._shares = Shares()
        self._overtaken = 0
        self.progress = 0
        """Changes whenever an image advances."""
        self._counts = 0, 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Running jobs. Thread-safe."""
        return tuple(each.job for each in tuple(self._running))

    @property
    def drawing(self) -> int:
        """Number of images in their denoising steps. Thread-safe."""
        return len(self._stepping)

    @property
    def _stepping(self) -> list[Running]:
        return [each for each in tuple(self._running) if each.drawing is not None]

    def cancel(self, request: str) -> None:
        """Stop the images of a request; their places are free in the next turn."""
        self._waiting.cancel(request)
        for running in [each for each in self._running if each.job.request == request]:
            self._leave(running)

    def show(self, wanted: Show) -> None:
        """Send previews of a request's images after their next step. Thread-safe."""
        for running in tuple(self._running):
            if running.job.request == wanted.request and not (running.show and running.show.end):
                running.show = wanted

    def run_all(self) -> None:
        """Run until nothing is queued or running."""
        while self.busy:
            self.turn()

    def turn(self) -> bool:
        """Run one batch of steps, or wait briefly for pending work. Return whether any image is running."""
        self._resume()
        while (job := self._waiting.take(self._next)) is not None:
            self._begin(job)
        self._look_ahead()
        any_drawn, batches = bool(self._running), list[Batch]()
        if stepping := self._stepping:
            group = self._next_group(stepping)
            self._finish_others(group)
            first = group[0].job
            pace = self._pace(first)
            size = _batch_size(group, pace)
            batches = self._run_batch(group[:size], size)
            if batches and own_size(first) and not first.conditioning.references:
                others = sum(_kind(job) == _kind(first) and own_size(job) for job in self._waiting.jobs)
                pace.note(size, batches[-1][2], max(0, len(group) - size) + others)
        elif any_drawn:
            self._wait()
        counts = self.drawing, len(self._waiting)
        if batches or counts != self._counts:  # turns are frequent while pipelines load: report changes only
            self._counts = counts
            self._tell(Turned(tuple(batches), *counts))
        return any_drawn

    def _places_of(self, job: Job) -> int:
        """Return how many images of this job's size may run at once."""
        return self._places or self._pace(job).places

    def _pace(self, job: Job) -> Pace:
        found = self._seconds[job.pipeline]
        return found if isinstance(found, Pace) else Pace(found)

    def _resume(self) -> None:
        """Advance the images whose pending work is done, without blocking."""
        for running in tuple(self._running):
            if running.pending is not None and running.pending.done():
                running.seconds["end"] += time.perf_counter() - running.since
                self._go_on(running, "end")

    def _wait(self) -> None:
        pending = next((each.pending for each in self._running if each.pending is not None), None)
        if pending is not None:
            pending.wait()

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        """Return the oldest job with a free place. A limited number of jobs with the LoRAs of running images overtake
        it, because they share runs; while its pipeline loads, any job with a loaded pipeline does."""
        waiting = self._with_places(waiting)
        if not waiting:
            return None
        oldest, kinds = waiting[0], {_kind(each.job) for each in self._running}
        there = self._ready(oldest, True)
        found = oldest if there else None
        if not there or self._overtaken < MOST_OVERTAKEN * self._places_of(oldest):
            found = next((job for job in waiting if _kind(job) in kinds), found)
        if found is None:
            found = next((job for job in waiting if self._ready(job, False)), None)
        if found is not None:
            self._overtaken = 0 if found is oldest else self._overtaken + 1
        return found

    def _with_places(self, waiting: Sequence[Job]) -> list[Job]:
        """Return the jobs with a free place, oldest first. At most SIZES_KEPT sizes run at once; a job of a further
        size waits, and no later job overtakes it."""
        taken = Counter(_size(each.job) for each in self._stepping)
        found = []
        for job in waiting:
            if _size(job) not in taken and len(taken) == SIZES_KEPT:
                break
            if taken[_size(job)] < self._places_of(job):
                found.append(job)
        return found

    def _look_ahead(self) -> None:
        """Start loading the pipeline of the next job with other LoRAs while all places are taken."""
        kinds = {_kind(each.job) for each in self._running}
        with self._waiting.changed:  # same lock order as in `take`: `ready` locks too
            other = next((job for job in self._waiting.jobs if _kind(job) not in kinds), None)
            if other is not None:
                self._ready(other, True)

    def _begin(self, job: Job) -> None:
        running = Running(job)
        running.work = self._work(running)
        self._running.append(running)
        self._tell(Begun(job.request, job.index))
        self._go_on(running, "begin")

    def _work(self, running: Running) -> Work:
        running.pipeline = self._find(running.job)
        return (yield from running.pipeline.draw(running.job, self._tell, running.take_show))

    def _next_group(self, stepping: Sequence[Running]) -> list[Running]:
        """Return the images that share the next run: the oldest of a flow, and those that can run with it. Others of
        the flow wait. Taking turns would delay all of them, and those that wait may start together."""
        flow = self._shares.next(dict.fromkeys(_flow(running.job) for running in stepping))
        own = [running for running in stepping if _flow(running.job) == flow]
        return [running for running in own if running.next_step() == own[0].next_step()]

    def _finish_others(self, group: Sequence[Running]) -> None:
        """Let pending work finish before a long step instead of after it. A GPU's steps are short."""
        if group[0].pipeline.base.place.stream is not None:
            return
        end = time.perf_counter() + SHORT * self._shares.step(_flow(group[0].job))
        while time.perf_counter() < end and any(each.pending is not None for each in self._running):
            self._wait()
            self._resume()

    def _run_batch(self, together: Sequence[Running], size: int) -> list[Batch]:
        """Run one batch. If it fails, out of memory for example, run its images one by one."""
        begun = time.perf_counter()
        try:
            together[0].pipeline.step([each.drawing for each in together if each.drawing is not None], size)
        except Exception as error:  # noqa: BLE001  (errors of ONNX Runtime and torch share no class)
            if len(together) > 1:
                log_line("batch_failed", images=len(together), kind=type(error).__name__, message=str(error))
                self._no_room(together[0], size)
                return [batch for running in together for batch in self._run_batch([running], 1)]
            self._fail(together[0], error)
            return []
        seconds = time.perf_counter() - begun
        self._shares.ran(_flow(together[0].job), seconds)
        for running in together:
            running.seconds["steps"] += seconds / len(together)
            self._go_on(running, "steps")
        return [(len(together), size, seconds)]

    def _no_room(self, running: Running, size: int) -> None:
        """Record that this batch size does not fit; with reference images, whose steps are larger, only for their
        sizes."""
        if running.steps is not None and running.job.conditioning.references:
            running.steps.alone = True
        else:
            self._pace(running.job).failed(size)

    def _go_on(self, running: Running, stage: str) -> None:
        """Advance an image to its next step, its next pending work or its end."""
        begun, drawn = time.perf_counter(), None
        self.progress += 1
        try:
            running.advance()
        except StopIteration as end:
            drawn = end.value
        except Exception as error:  # noqa: BLE001  (reported; unexpected errors with a traceback)
            self._fail(running, error)
            return
        finally:
            self.progress += 1
        running.since = time.perf_counter()
        running.seconds["end" if running.drawing is None else stage] += running.since - begun
        if drawn is not None:
            self._leave(running)
            self._tell(replace(drawn, seconds=dict(running.seconds)))

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        self._waiting.release(running.job)
        self.progress += 1
        running.work.close()

    def _fail(self, running: Running, error: Exception) -> None:
        self._leave(running)
        said: tuple[str, str | None, str | None] = (str(error), None, None)
        if isinstance(error, SdflowError):
            said = error.what, error.where, error.remedy
        else:
            log_error(error)
        self._tell(Failed(running.job.request, running.job.index, type(error).__name__, *said))


def _batch_size(group: Sequence[Running], pace: Pace) -> int:
    """Return the most efficient batch size for a group, or the largest below it that is ready."""
    drawings = [each.drawing for each in group if each.drawing is not None]
    steps, wanted = group[0].steps, pace.size(len(group))
    if steps is None or steps.alone:
        return 1
    sizes = (size for size in sorted(pace.seconds, reverse=True) if size <= wanted)
    return next((size for size in sizes if steps.usable(size, halves(drawings[:size]))), 1)


def own_size(job: Job) -> bool:
    """Whether the image has the model's own size, because the job gives none."""
    return "height" not in job.arguments


def _kind(job: Job) -> tuple[str, tuple[LoraFile, ...]]:
    """Return a key that is equal for jobs that may share runs."""
    return job.pipeline, job.loras


def _size(job: Job) -> Hashable:
    """Return a key for the image size, as far as it is known before the start."""
    return job.pipeline, job.arguments.get("height"), job.arguments.get("width")


def _flow(job: Job) -> Hashable:
    """Return the key by which device time is shared."""
    return _kind(job), _size(job)
