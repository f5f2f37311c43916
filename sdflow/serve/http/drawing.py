"""The requests that are being drawn: how many there may be, what they hear of the worker, and how they end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdflow.serve.api_error import ApiError, of_failure
from sdflow.serve.jobs import Begun, Cancel, Drawn, Failed, Job, Lost, Message, OfImage, Order, Ready, Show
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics

RESTART_SECONDS = 5
"""What is told of when the worker will be back."""


@dataclass
class _OpenRequest:
    """A request that is being drawn. open: its images that are not finished; begun: those of them that the worker began. queue:
    what is said of it; None: it was interrupted. count: of the images that will come. survived: whether a worker died while it
    waited there."""

    jobs: Sequence[Job]
    open: set[int]
    begun: set[int] = field(default_factory=set)
    queue: asyncio.Queue[OfImage | Lost | None] = field(default_factory=asyncio.Queue)
    survived: bool = False
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.jobs)

    def hear(self, message: OfImage) -> None:
        if message.index not in self.open:
            return
        if isinstance(message, Begun):
            self.begun.add(message.index)
        elif isinstance(message, Drawn | Failed):
            self.open.discard(message.index)
            self.begun.discard(message.index)
        self.queue.put_nowait(message)


class Drawing:
    """The requests of one worker; all of it in the event loop's thread. send: to the worker.

    When the worker dies, those fail that it was drawing: one of them may be why. Those that waited are sent to the next
    worker, once.
    """

    def __init__(self, limits: Limits, metrics: Metrics, send: Callable[[Order], None]) -> None:
        self._limits, self._metrics, self._send = limits, metrics, send
        self.found: Mapping[str, Mapping[str, Any]] | None = None
        self.seconds_per_image = 1.0
        self._requests: dict[str, _OpenRequest] = {}
        self._last_drawn = 0.0

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.found is not None

    @property
    def images(self) -> int:
        """That are drawn or wait."""
        return sum(len(waiting.open) for waiting in self._requests.values())

    def hear(self, message: Message) -> None:
        """What the worker says."""
        self._metrics.hear(message)
        if isinstance(message, Ready):
            if self.found is None:
                for waiting in self._requests.values():
                    self._send_open(waiting)
            said = {} if self._limits.pixels is None else {"max_pixels": self._limits.pixels}
            self.found = {name: {**found, **said} for name, found in message.pipelines.items()}
        elif isinstance(message, Lost):
            self.found = None
            for waiting in self._requests.values():
                if waiting.begun or waiting.survived:
                    waiting.queue.put_nowait(message)
                waiting.survived = True
        elif isinstance(message, OfImage):
            if isinstance(message, Drawn):
                self._note_pace()
            if message.request in self._requests:
                self._requests[message.request].hear(message)

    def most_pixels(self, pipeline: str) -> int | None:
        """Of an image: as somebody said, or as the worker measured; None before that."""
        if self.found is None:
            return self._limits.pixels
        found: int | None = self.found[pipeline].get("max_pixels")
        return found

    def _send_open(self, waiting: _OpenRequest) -> None:
        for job in waiting.jobs:
            if job.index in waiting.open:
                self._send(job)

    def _note_pace(self) -> None:
        """How often an image is finished, as the last ones were."""
        now = time.monotonic()
        if self._requests and self._last_drawn:
            self.seconds_per_image += 0.2 * (min(now - self._last_drawn, 60.0) - self.seconds_per_image)
        self._last_drawn = now

    def require_place(self, images: int) -> None:
        """Raises ApiError when so many more images cannot be taken now."""
        if self.found is None:
            raise self._refusal("not_ready", 503, "The pipelines are being loaded.", RESTART_SECONDS)
        if self.images + images > self._limits.queue:
            seconds = max(1, math.ceil(self.seconds_per_image * (self.images + images - self._limits.queue)))
            words = f"{self.images} images are drawn or wait, and {self._limits.queue} may. Try again in {seconds} s."
            raise self._refusal("queue_full", 429, words, seconds)

    def _refusal(self, code: str, status: int, message: str, retry_after: int) -> ApiError:
        self._metrics.refusals.labels(code).inc()
        return ApiError(status, message, code=code, retry_after=retry_after)

    def show(self, request: str, *, end: bool = False) -> None:
        """Previews of what is being drawn of a request will come, after their next step. end: as the finished images."""
        self._send(Show(request, end))

    def interrupt(self, request: str) -> None:
        """What is being drawn of a request is finished as it is after its next step; what waits is not drawn."""
        waiting = self._requests.get(request)
        if waiting is None:  # it has ended
            return
        self.show(request, end=True)
        waiting.count -= len(waiting.open - waiting.begun)
        waiting.open &= waiting.begun
        waiting.queue.put_nowait(None)

    async def draw(self, jobs: Sequence[Job]) -> AsyncIterator[OfImage]:
        """What happens to the images of one request, until the last is drawn.

        Raises ApiError when there is no place for them, one fails, the worker dies, or it takes too long. However it ends,
        nothing of it is drawn any more.
        """
        self.require_place(len(jobs))
        request = jobs[0].request
        waiting = self._requests[request] = _OpenRequest(jobs, {job.index for job in jobs})
        drawn, end = 0, asyncio.get_running_loop().time() + self._limits.seconds
        try:
            self._send_open(waiting)
            while drawn < waiting.count:
                async with asyncio.timeout_at(
                    end
                ):  # not around `yield`: it would end whoever asks, wherever that is then
                    message = await waiting.queue.get()
                if isinstance(message, Lost):
                    words = f"The process that draws ended: {message.what}. It is started again."
                    raise self._refusal("worker_lost", 503, words, RESTART_SECONDS)
                if isinstance(message, Failed):
                    raise of_failure(message)
                drawn += isinstance(message, Drawn)
                if message is not None:
                    yield message
        except TimeoutError as error:
            words = f"It was not drawn within {self._limits.seconds:g} s."
            raise self._refusal("deadline", 504, words, 1) from error
        finally:
            del self._requests[request]
            if waiting.open or waiting.count < len(jobs):
                self._send(Cancel(request))
