"""A replica: draws the images that the front sends, in a worker process of its own, as the server of one machine does.

Which LoRAs it has loaded is known to Ray Serve by its own means, model multiplexing: a combination of LoRAs is a model there, and
a request for one goes to a replica that has it, unless that has too much to do. Imports Ray.
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
from sdflow.serve.worker.worker import WorkerLine

LORAS_HELD = 32
"""Combinations of LoRAs that a replica counts as having; the last ones asked for. The worker keeps weights by bytes."""


def loras_id(job: Job) -> str:
    """What Ray Serve knows the LoRAs of a job by; "" without any. Other scales of the same files are the same: what is read of
    them is shared."""
    if not job.loras:
        return ""
    files = "\n".join([job.pipeline, *(lora.sha256 for lora in job.loras)])
    return hashlib.sha256(files.encode()).hexdigest()[:16]


class Replica:
    """One that draws. It is there once its pipelines are loaded."""

    async def __init__(self, options: WorkerOptions) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Raises RuntimeError in words when they cannot be."""
        loop = asyncio.get_running_loop()
        os.environ.update({name: os.environ.get(name, value) for name, value in SILENT.items()})  # of the worker
        self._requests: dict[str, asyncio.Queue[Message]] = {}
        self._found: Mapping[str, Mapping[str, Any]] | None = None
        self._ready = asyncio.Event()
        self._lost: Lost | None = None
        self._forgotten: frozenset[tuple[str, str]] = frozenset()
        self._heard = asyncio.Event()
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
        """Ray Serve asks now and then, and starts another replica in the place of one whose worker does not come back."""
        if self._lost is not None:
            raise RuntimeError(spelled(self._lost))

    async def found(self) -> Mapping[str, Mapping[str, Any]]:
        """What it found out about each pipeline."""
        await self._ready.wait()
        assert self._found is not None, "it is ready"
        return self._found

    async def draw(self, job: Job, loras: str, forgotten: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Message]:
        """What happens to one image, up to `Drawn`, `Failed` or `Lost`. job: with a request of its own. loras: as `loras_id`
        gives it. forgotten: the LoRAs that were deleted last, each with a name of its deletion. However it ends, nothing of it
        is drawn any more."""
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
            del self._requests[job.request]
            if not ended:
                self._line.send(Cancel(job.request))

    @serve.multiplexed(max_num_models_per_replica=LORAS_HELD)  # type: ignore[untyped-decorator,unused-ignore]
    async def _holding(self, loras: str) -> str:
        """From now on Ray Serve knows that they are here. The worker loads them with the first job, and what comes meanwhile
        waits there, and does not load them elsewhere too."""
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
            for queue in list(self._requests.values())[:1]:  # one tells it: it is counted
                queue.put_nowait(message)
        elif isinstance(message, OfImage) and message.request in self._requests:
            self._requests[message.request].put_nowait(message)


def spelled(lost: Lost) -> str:
    """In one line."""
    what = f"{lost.where}: {lost.what}" if lost.where else lost.what
    return f"{what}. {lost.remedy}" if lost.remedy else what
