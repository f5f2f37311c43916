"""A replica generates images for the front in its own worker process, like the server on a single machine.

Ray Serve tracks loaded LoRAs by model multiplexing: a combination of LoRAs counts as a model, and its requests go to a
replica that has it unless that one is overloaded. Imports Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from sdflow.serve.http.server import SILENT
from sdflow.serve.jobs import Cancel, Drawn, Failed, Forget, Job, Lost, Message, OfImage, Ready, Turned, WorkerOptions
from sdflow.serve.on_ray.progress import Progress
from sdflow.serve.worker.worker import WorkerLine

LORAS_HELD = 32
"""LoRA combinations that a replica reports as loaded, most recently used. The worker limits weights by bytes."""


def loras_id(job: Job) -> str:
    """Return the id of a job's LoRAs for Ray Serve, "" without any. Scales do not matter: the files are the same."""
    if not job.loras:
        return ""
    files = "\n".join([job.pipeline, *(lora.sha256 for lora in job.loras)])
    return hashlib.sha256(files.encode()).hexdigest()[:16]


class Replica:
    """A replica, ready once its pipelines are loaded."""

    async def __init__(self, options: WorkerOptions) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Raises RuntimeError with the reason if they cannot be loaded."""
        loop = asyncio.get_running_loop()
        os.environ.update(
            {name: os.environ.get(name, value) for name, value in SILENT.items()}
        )  # inherited by the worker
        self._requests: dict[str, asyncio.Queue[Message]] = {}
        self._found: Mapping[str, Mapping[str, Any]] | None = None
        self._ready = asyncio.Event()
        self._lost: Lost | None = None
        self._forgotten: frozenset[tuple[str, str]] = frozenset()
        self._heard = asyncio.Event()
        self._progress = Progress()
        self._name = serve.get_replica_context().replica_id.unique_id

        def hear(message: Message) -> None:
            loop.call_soon_threadsafe(self._hear, message)

        self._line = WorkerLine(options, hear)
        self._line.start()
        await self._heard.wait()
        if self._lost is not None:
            await asyncio.to_thread(self._line.end)
            raise RuntimeError(spelled(self._lost))

    def __del__(self) -> None:
        if hasattr(self, "_line"):
            self._line.end()

    def check_health(self) -> None:
        """Called periodically by Ray Serve, which replaces the replica if its worker does not come back."""
        if self._lost is not None:
            raise RuntimeError(spelled(self._lost))

    async def found(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what was measured for each pipeline."""
        await self._ready.wait()
        assert self._found is not None, "it is ready"
        return self._found

    async def draw(self, job: Job, loras: str, forgotten: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Message]:
        """Generate one image and yield its messages, up to `Drawn`, `Failed` or `Lost`; cancel it if closed earlier.
        job: with its own request id. loras: from `loras_id`. forgotten: (id, path) of recent LoRA deletions."""
        if loras:
            await self._holding(loras)
        await self._ready.wait()
        queue = self._requests[job.request] = asyncio.Queue()
        ended = False
        try:
            for each in forgotten:
                if each not in self._forgotten:
                    self._line.send(Forget(each[1]))
            self._forgotten = frozenset(forgotten)
            self._line.send(job)
            while not ended:
                message = await queue.get()
                ended = isinstance(message, Drawn | Failed | Lost)
                yield replace(message, replica=self._name) if isinstance(message, Drawn) else message
        finally:
            self._requests.pop(job.request, None)
            self._progress.ended(job.request)
            if not ended:
                self._line.send(Cancel(job.request))

    @serve.multiplexed(max_num_models_per_replica=LORAS_HELD)  # type: ignore[untyped-decorator,unused-ignore]
    async def _holding(self, loras: str) -> str:
        """Mark these LoRAs as loaded before the worker loads them, so that further requests queue here."""
        return loras

    def _hear(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._found, self._lost = message.pipelines, None
            self._ready.set()
            self._heard.set()
        elif isinstance(message, Lost):
            self._lost = message
            self._ready.clear()
            self._heard.set()
            for queue in self._requests.values():
                queue.put_nowait(message)
        elif isinstance(message, Turned):
            if (report := self._progress.turned(message, bool(self._requests))) is not None:
                next(iter(self._requests.values())).put_nowait(report)  # only one: the front adds them up
        elif isinstance(message, OfImage) and message.request in self._requests and self._progress.due(message):
            last = isinstance(message, Drawn | Failed)  # its reader ends: no report may follow
            queue = self._requests.pop(message.request) if last else self._requests[message.request]
            queue.put_nowait(message)


def spelled(lost: Lost) -> str:
    """Format the error as one line."""
    what = f"{lost.where}: {lost.what}" if lost.where else lost.what
    return f"{what}. {lost.remedy}" if lost.remedy else what
