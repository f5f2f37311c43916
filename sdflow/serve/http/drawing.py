"""Open requests: admission to the queue, delivery of worker messages, and how requests end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.serve.api_error import ApiError, invalid, of_failure
from sdflow.serve.http.queue_seconds import QueueSeconds
from sdflow.serve.jobs import (
    Begun,
    Cancel,
    Drawn,
    Drop,
    Failed,
    Forget,
    Job,
    Load,
    Loaded,
    Lost,
    Message,
    OfImage,
    Order,
    Ready,
    Show,
    Stepped,
)
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics
from sdflow.serve.tracing import RECORD

RESTART_SECONDS = 5
"""Retry-After in seconds while no worker is ready."""


@dataclass
class _OpenRequest:
    """A request in progress."""

    jobs: Sequence[Job]
    open: set[int]  # unfinished images
    count: int  # images that will be delivered
    begun: dict[int, float] = field(default_factory=dict)  # running images -> fraction of steps left
    queue: asyncio.Queue[OfImage | Lost | None] = field(default_factory=asyncio.Queue)  # None: interrupted
    survived: bool = False  # a worker died while this was queued

    def hear(self, message: OfImage) -> None:
        if message.index not in self.open:
            return
        if isinstance(message, Begun):
            self.begun[message.index] = 1.0
        elif isinstance(message, Stepped) and message.index in self.begun:
            self.begun[message.index] = 1 - message.done / max(message.total, 1)
        elif isinstance(message, Drawn | Failed):
            self.open.discard(message.index)
            self.begun.pop(message.index, None)
        self.queue.put_nowait(message)


class Drawing:
    """Requests of one worker. All methods run in the event loop's thread. send: sends to the worker once there is one.
    draining: whether the server is shutting down and accepts no more requests.

    When the worker dies, its running requests fail, because one may be the cause; queued ones are sent again, once.
    """

    def __init__(self, limits: Limits, metrics: Metrics, send: Callable[[Order], None] = lambda order: None) -> None:
        self._limits, self._metrics, self.send = limits, metrics, send
        self.found: Mapping[str, Mapping[str, Any]] | None = None
        self.draining = False
        self._seconds = QueueSeconds()
        self._requests: dict[str, _OpenRequest] = {}
        self._loading: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._orders = itertools.count(1)

    @property
    def ready(self) -> bool:
        return self.found is not None and not self.draining

    @property
    def images(self) -> int:
        """Number of running and queued images."""
        return sum(len(waiting.open) for waiting in self._requests.values())

    def hear(self, message: Message) -> None:
        self._metrics.hear(message)
        if isinstance(message, Ready):
            if self.found is None:
                for waiting in self._requests.values():
                    self._send_open(waiting, message)
            self.found = {}
            for name, found in message.pipelines.items():
                self._note(name, found)
        elif isinstance(message, Loaded):
            number, _ = self._loading.get(message.name, (None, None))
            if number != message.number:  # removed meanwhile
                return
            if message.found is not None and self.found is not None:
                self._note(message.name, message.found)
            words = f"{message.name} cannot be loaded: {message.error}."
            self._end_loading(message.name, invalid("id", words) if message.found is None else None)
        elif isinstance(message, Lost):
            self.found = None
            for name in tuple(self._loading):
                self._end_loading(name, _lost(message))
            for waiting in self._requests.values():
                if waiting.begun or waiting.survived:
                    waiting.queue.put_nowait(message)
                waiting.survived = True
        elif isinstance(message, OfImage) and message.request in self._requests:
            waiting = self._requests[message.request]
            if isinstance(message, Drawn):
                self._seconds.note(waiting.jobs[message.index], message)
            waiting.hear(message)

    def _note(self, name: str, found: Mapping[str, Any]) -> None:
        said = {} if self._limits.pixels is None else {"max_pixels": self._limits.pixels}
        self.found = {**(self.found or {}), name: {**found, **said}}
        self._seconds.start(name, found)

    def _end_loading(self, name: str, error: ApiError | None) -> None:
        _, loading = self._loading.pop(name, (0, None))
        if loading is None or loading.done():
            return
        if error is None:
            loading.set_result(None)
        else:
            loading.set_exception(error)

    async def load(self, name: str, folder: Path) -> None:
        """Have the worker load a pipeline. Raises ApiError if it cannot."""
        self.require_place(0)
        if name in self._loading:
            raise ApiError(409, f"{name} is already being loaded.", param="id", code="loading")
        number, loading = next(self._orders), asyncio.get_running_loop().create_future()
        self._loading[name] = number, loading
        self.send(Load(name, folder, number))
        await asyncio.shield(loading)

    def drop(self, name: str) -> None:
        """Have the worker unload a pipeline after its open requests finish."""
        words = f"{name} was removed while it was loading."
        self._end_loading(name, ApiError(409, words, param="id", code="loading"))
        self.send(Drop(name))
        self.found = None if self.found is None else {each: self.found[each] for each in self.found if each != name}

    def forget(self, lora: Path) -> None:
        """Have the worker release weights with this LoRA file."""
        self.send(Forget(str(lora)))

    def most_pixels(self, pipeline: str) -> int | None:
        """Return the configured or measured maximum pixels of an image, None before the measurement."""
        found: int | None = (self.found or {}).get(pipeline, {}).get("max_pixels", self._limits.pixels)
        return found

    def _send_open(self, waiting: _OpenRequest, ready: Ready | None = None) -> None:
        """Send unfinished images. ready: message of a new worker; images whose pipeline was removed meanwhile fail."""
        for job in waiting.jobs:
            if job.index in waiting.open:
                if ready is None or job.pipeline in ready.pipelines:
                    self.send(job)
                else:
                    waiting.hear(Failed(job.request, job.index, "UsageError", "its pipeline was removed", "model"))

    def require_place(self, images: int) -> None:
        """Raise ApiError if this many more images cannot be accepted now."""
        if self.draining:
            raise self._refusal("draining", 503, "The server is shutting down.", RESTART_SECONDS)
        if self.found is None:
            raise self._refusal("not_ready", 503, "The pipelines are still loading.", RESTART_SECONDS)
        if self.images + images > self._limits.queue:
            seconds = self._seconds_until(min(self.images, self.images + images - self._limits.queue))
            more = f"{images} more do not fit" if images > 1 else "1 more does not fit"
            words = f"The queue has {self.images} of at most {self._limits.queue} images, so {more}."
            raise self._refusal("queue_full", 429, f"{words} Try again in {seconds} s.", seconds)

    def _seconds_until(self, ended: int) -> int:
        """Estimate the seconds until this many running or queued images finish."""
        drawing, waiting = list[float](), list[float]()
        for each in self._requests.values():
            for job in each.jobs:
                if job.index in each.open:
                    left = each.begun.get(job.index)
                    (waiting if left is None else drawing).append(self._seconds.of(job, 1.0 if left is None else left))
        return self._seconds.until(ended, drawing, waiting)

    def _refusal(self, code: str, status: int, message: str, retry_after: int) -> ApiError:
        self._metrics.refusals.labels(code).inc()
        return ApiError(status, message, code=code, retry_after=retry_after)

    def show(self, request: str, *, end: bool = False) -> None:
        """Request previews of a request's running images after their next step. end: as the finished images."""
        self.send(Show(request, end))

    def interrupt(self, request: str) -> None:
        """Finish a request's running images as they are after their next step, and drop the queued ones."""
        if (waiting := self._requests.get(request)) is None:  # already ended
            return
        self.show(request, end=True)
        waiting.count -= len(waiting.open - waiting.begun.keys())
        waiting.open.intersection_update(waiting.begun)
        waiting.queue.put_nowait(None)

    async def draw(self, jobs: Sequence[Job]) -> AsyncIterator[OfImage]:
        """Yield the messages of one request's images until the last image is finished.

        Raises ApiError if the images do not fit into the queue, an image fails, the worker dies, or the deadline
        passes. If the caller stops early, the remaining images are cancelled.
        """
        self.require_place(len(jobs))
        request, record, sent = jobs[0].request, RECORD.get(), time.monotonic()
        begun = dict[int, float]()
        waiting = self._requests[request] = _OpenRequest(jobs, {job.index for job in jobs}, len(jobs))
        drawn, end = 0, asyncio.get_running_loop().time() + self._limits.seconds
        try:
            self._send_open(waiting)
            while drawn < waiting.count:
                async with asyncio.timeout_at(end):  # not around `yield`: it would cancel the caller
                    message = await waiting.queue.get()
                if isinstance(message, Lost):
                    self._metrics.refusals.labels("worker_lost").inc()
                    raise _lost(message)
                if isinstance(message, Failed):
                    raise of_failure(message)
                now = time.monotonic()
                if isinstance(message, Begun):
                    begun.setdefault(message.index, now)
                    self._metrics.queued.labels(jobs[0].pipeline).observe(now - sent)
                    if record is not None:
                        record("queue", now - sent, {"image": message.index})
                elif isinstance(message, Drawn):
                    drawn += 1
                    if record is not None:
                        ago = now - begun.get(message.index, sent)
                        record("generate", ago, {"image": message.index, **message.seconds})
                if message is not None:
                    yield message
        except TimeoutError as error:
            raise self._refusal("deadline", 504, f"Not finished within {self._limits.seconds:g} s.", 1) from error
        finally:
            del self._requests[request]
            if waiting.open or waiting.count < len(jobs):
                self.send(Cancel(request))


def _lost(message: Lost) -> ApiError:
    words = f"The worker process ended: {message.what}. It is being restarted."
    return ApiError(503, words, code="worker_lost", retry_after=RESTART_SECONDS)
