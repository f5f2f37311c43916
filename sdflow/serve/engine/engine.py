"""The loop: each image that is being drawn goes a step further in a turn, those that fit together in one run.

A turn: images that wait begin while there is a place; the oldest that ask for a step get it in one batch, as many as are
fastest together; each goes on from there, to its next step or to its end. So a new image joins at the next step, and a
finished one leaves. At its end an image waits for its decoder, for the safety checker and for its file (`elsewhere`): it has no
place any more, and the others go on.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sdflow.errors import SdflowError
from sdflow.serve.engine.batch_plan import next_batch
from sdflow.serve.engine.elsewhere import Elsewhere
from sdflow.serve.engine.paused_call import PausedCall
from sdflow.serve.engine.pausing import Alone, Asked, Shared
from sdflow.serve.engine.served_pipeline import Callbacks, Finished, ServedPipeline
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.jobs import Begun, Drawn, Failed, Job, LoraFile, Message, Preview, Stepped, Turned

if TYPE_CHECKING:
    import torch

MOST_OVERTAKEN = 2
"""How many images may overtake one, for each place."""

Batch = tuple[int, int, float]
"""Images, places, seconds."""


@dataclass
class _Drawing:
    """An image on its way. seconds: by stage. since: when it began to wait for what is done elsewhere."""

    job: Job
    call: PausedCall[Asked, Any, Finished]
    seconds: dict[str, float] = field(default_factory=lambda: {"begin": 0.0, "steps": 0.0, "end": 0.0})
    since: float = 0.0

    @property
    def elsewhere(self) -> Elsewhere | None:
        """What it waits for, if it is no step."""
        return self.call.asked if isinstance(self.call.asked, Elsewhere) else None


class Engine:
    """Draws jobs.

    find: gives the pipeline that draws a job, with its LoRAs. ready: whether that is there; it begins to be made if the second
    argument says so. seconds: of a run of each pipeline's denoiser by size of the
    batch; these sizes are used. places: how many images are drawn at once. tell: is told what happens.
    """

    def __init__(
        self,
        find: Callable[[Job], ServedPipeline],
        seconds: Mapping[str, Mapping[int, float]],
        tell: Callable[[Message], None],
        places: int | None = None,
        ready: Callable[[Job, bool], bool] = lambda job, begin: True,
        waiting: Waiting | None = None,
    ) -> None:
        self._find, self._seconds, self._tell, self._ready = find, seconds, tell, ready
        self.places = places or max(max(each) for each in seconds.values())
        self._waiting = Waiting() if waiting is None else waiting
        self._drawing: list[_Drawing] = []
        self._overtaken = 0
        self.progress = 0
        """Changes whenever an image goes on."""
        self._counts = 0, 0
        self._resident = Resident()

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting or self._drawing)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """That are being drawn; for other threads, too."""
        return tuple(drawing.job for drawing in tuple(self._drawing))

    def submit(self, job: Job) -> None:
        """Draw this when there is a place for it."""
        self._waiting.add(job)

    def cancel(self, request: str) -> None:
        """Draw no more of a request; its places are free for the next turn."""
        self._waiting.cancel(request)
        for drawing in [each for each in self._drawing if each.job.request == request]:
            self._leave(drawing)

    def turn(self) -> bool:
        """A batch of steps; whether any image is being drawn. Where none asks for a step, it waits a little for the others."""
        self._resume()
        while self._stepping < self.places and (job := self._waiting.take(self._next)) is not None:
            self._begin(job)
        self._look_ahead()
        any_drawn, batches = bool(self._drawing), list[Batch]()
        for pipeline, group in self._groups():
            size = next_batch(len(group), self._seconds[pipeline])
            batches += self._run_batch(group[:size], size)
        if any_drawn and not batches:
            self._wait()
        counts = self._stepping, len(self._waiting)
        if batches or counts != self._counts:  # while all that waits is being made, turns follow each other quickly
            self._counts = counts
            self._tell(Turned(tuple(batches), *counts, self._resident.bytes()))
        return any_drawn

    @property
    def _stepping(self) -> int:
        return sum(drawing.elsewhere is None for drawing in self._drawing)

    def _resume(self) -> None:
        """Go on with what is done elsewhere, and wait for nothing."""
        for drawing in tuple(self._drawing):
            while (waited := drawing.elsewhere) is not None and waited.done():
                drawing.seconds["end"] += time.perf_counter() - drawing.since
                self._go_on(drawing, "end", partial(drawing.call.answer, None))

    def _wait(self) -> None:
        for drawing in self._drawing:
            if (waited := drawing.elsewhere) is not None:
                waited.wait()
                return

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        """The oldest that waits; before it one with the LoRAs of what is being drawn, which shares its runs. But the oldest is
        not overtaken again and again, unless its pipeline is still being made: then by anyone whose pipeline is there."""
        if not waiting:
            return None
        oldest, kinds = waiting[0], {_kind(drawing.job) for drawing in self._drawing}
        there = self._ready(oldest, True)
        found = oldest if there else None
        if not there or self._overtaken < MOST_OVERTAKEN * self.places:
            found = next((job for job in waiting if _kind(job) in kinds), found)
        if found is None:
            found = next((job for job in waiting if self._ready(job, False)), None)
        if found is not None:
            self._overtaken = 0 if found is oldest else self._overtaken + 1
        return found

    def _look_ahead(self) -> None:
        """While all places are taken, the pipeline of the next job with other LoRAs is made."""
        kinds = {_kind(drawing.job) for drawing in self._drawing}
        for job in self._waiting.jobs:
            if _kind(job) not in kinds:
                self._ready(job, True)
                return

    def _begin(self, job: Job) -> None:
        """From the prompt to the first step."""
        told = Callbacks(
            lambda done, total: self._tell(Stepped(job.request, job.index, done, total)),
            lambda number, file: self._tell(Preview(job.request, job.index, number, file)),
        )
        drawing = _Drawing(job, PausedCall(lambda ask: self._find(job).draw(job, ask, told)))
        self._drawing.append(drawing)
        self._tell(Begun(job.request, job.index))
        self._go_on(drawing, "begin", drawing.call.begin)

    def _groups(self) -> list[tuple[str, list[_Drawing]]]:
        """What can be run together: of one pipeline and one size."""
        groups: dict[tuple[str, int], list[_Drawing]] = {}
        for drawing in self._drawing:
            asked = drawing.call.asked
            if isinstance(asked, Elsewhere):
                continue
            key = id(asked.steps) if isinstance(asked, Shared) else id(drawing)
            groups.setdefault((drawing.job.pipeline, key), []).append(drawing)
        return [(pipeline, group) for (pipeline, _), group in groups.items()]

    def _run_batch(self, together: Sequence[_Drawing], size: int) -> list[Batch]:
        """Run one batch. What a batch cannot, as for want of memory, each image tries by itself: only one that fails so fails."""
        begun = time.perf_counter()
        try:
            outputs = _outputs([drawing.call.asked for drawing in together], size)
        except Exception as error:  # noqa: BLE001  (ONNX Runtime's and torch's have no common class; it is told)
            if len(together) > 1:
                return [batch for drawing in together for batch in self._run_batch([drawing], 1)]
            self._leave(together[0])
            self._failed(together[0], error)
            return []
        seconds = time.perf_counter() - begun
        for drawing, output in zip(together, outputs, strict=True):
            drawing.seconds["steps"] += seconds / len(together)
            self._go_on(drawing, "steps", partial(drawing.call.answer, output))
        return [(len(together), size, seconds)]

    def _go_on(self, drawing: _Drawing, stage: str, go_on: Callable[[], None]) -> None:
        begun = time.perf_counter()
        self.progress += 1
        go_on()
        self.progress += 1
        drawing.since = time.perf_counter()
        stays = drawing.call.asked is not None and drawing.elsewhere is None
        drawing.seconds[stage if stays else "end"] += drawing.since - begun
        if drawing.call.asked is None:
            self._end(drawing)

    def _end(self, drawing: _Drawing) -> None:
        self._drawing.remove(drawing)
        job = drawing.job
        self._waiting.release(job)
        try:
            image = drawing.call.result()
        except Exception as error:  # noqa: BLE001  (it is told, with its traceback if nobody foresaw it)
            self._failed(drawing, error)
        else:
            seconds = dict(drawing.seconds)
            self._tell(Drawn(job.request, job.index, image.file, image.size, image.flagged, seconds))

    def _leave(self, drawing: _Drawing) -> None:
        self._drawing.remove(drawing)
        self._waiting.release(drawing.job)
        self.progress += 1
        drawing.call.end()

    def _failed(self, drawing: _Drawing, error: Exception) -> None:
        job, kind = drawing.job, type(error).__name__
        if isinstance(error, SdflowError):
            self._tell(Failed(job.request, job.index, kind, error.what, error.where, error.remedy))
            return
        with suppress(OSError):  # a log that is full stops no drawing
            traceback.print_exception(error)
        self._tell(Failed(job.request, job.index, kind, str(error)))


def _kind(job: Job) -> tuple[str, tuple[LoraFile, ...]]:
    """What must be equal for two to share runs."""
    return job.pipeline, job.loras


def _outputs(asked: Sequence[Asked | None], size: int) -> list[torch.Tensor]:
    import torch

    shared = [each for each in asked if isinstance(each, Shared)]
    with torch.no_grad():
        if not shared:
            return [each.run() for each in asked if isinstance(each, Alone)]
        return shared[0].steps.run([each.step for each in shared], size)


class Resident:
    """Bytes of this process in memory, looked up now and then: that takes as long as several steps' messages."""

    SECONDS = 0.5

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._known, self._until = 0, 0.0

    def bytes(self) -> int:
        """As of half a second ago at most."""
        if time.monotonic() >= self._until:
            self._known, self._until = int(self._process.memory_info().rss), time.monotonic() + self.SECONDS
        return self._known
