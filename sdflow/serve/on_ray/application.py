"""The Ray Serve application: a front, which is the server's own ASGI application behind Ray Serve's proxy, and
replicas.

The front holds what requests share: queue, uploaded LoRAs and metrics. There is one, and it needs no core of its own.
Replicas scale with the running and queued images. Each image is a request of its own, for which Ray Serve picks a
replica. If the replica is lost, another one repeats it: a job contains all that its image depends on. Imports Ray.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, TaskCancelledError

from sdflow.serve.http.app import Hear, make_app
from sdflow.serve.http.settings import Settings
from sdflow.serve.jobs import (
    Begun,
    Cancel,
    Drawn,
    Failed,
    Forget,
    Job,
    Lost,
    Message,
    OfImage,
    Order,
    Ready,
    Show,
    Turned,
)
from sdflow.serve.on_ray.replica import Replica, loras_id
from sdflow.serve.on_ray.spread import NAME, QUIET, Spread

ATTEMPTS = 4
"""How often to start an image whose replica is lost."""
LOST = (ActorDiedError, ActorUnavailableError, RayActorError)

FORGOTTEN = 64
"""Recent LoRA deletions that each job carries along, because Ray Serve cannot broadcast to replicas."""
REPLICAS = "Replica"
REQUESTS = 1000
"""Maximum concurrent requests of the front, including the page and monitoring."""
UPSCALE_SECONDS = 5.0


def application(settings: Settings, spread: Spread) -> Any:
    """Build the Ray Serve application. Nodes read all files under the same paths as this machine. Ray lists a replica's
    GPUs in CUDA_VISIBLE_DEVICES, which its worker inherits; a fraction of one bounds the memory."""
    worker = replace(settings.worker, gpu_share=spread.gpus if 0 < spread.gpus < 1 else None)

    def front() -> Any:
        """Create the front, in its process."""
        handle = serve.get_deployment_handle(REPLICAS, NAME)
        return make_app(settings, lambda hear: ReplicaLine(handle, hear))

    options: dict[str, Any] = {"num_replicas": spread.least}
    if spread.most > spread.least:
        options = {
            "autoscaling_config": {
                "min_replicas": spread.least,
                "max_replicas": spread.most,
                "target_ongoing_requests": spread.queue,
                "upscale_delay_s": UPSCALE_SECONDS,
            }
        }
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        max_ongoing_requests=2 * spread.queue,
        graceful_shutdown_timeout_s=spread.drain,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": settings.worker.threads or 1, "num_gpus": spread.gpus},
        logging_config=QUIET,
        **options,
    ).bind(worker)
    return serve.deployment(
        serve.ingress(front)(),
        name="Front",
        num_replicas=1,
        max_ongoing_requests=REQUESTS,
        graceful_shutdown_timeout_s=spread.drain,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    ).bind(replicas)


class ReplicaLine:
    """A `Line` to the replicas. handle: Ray Serve's handle of their deployment."""

    def __init__(self, handle: Any, hear: Hear) -> None:
        self._handle, self._hear = handle, hear
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[tuple[str, int], bool] = {}
        """(request, index) of each open image: whether a replica has begun it."""
        self._forgotten = deque[tuple[str, str]](maxlen=FORGOTTEN)
        self._memory = 0

    def start(self) -> None:
        """Start, in the event loop. Messages come from its thread."""
        self._loop = asyncio.get_running_loop()
        self._asking = self._loop.create_task(self._ask())

    def send(self, message: Order) -> None:
        """Send an order, in the event loop's thread. Previews are not possible: the replica of an image is unknown."""
        if isinstance(message, Job):
            self._begin(message.request, self._draw(message))
        elif isinstance(message, Forget):
            self._forgotten.append((uuid.uuid4().hex, message.path))
        elif isinstance(message, Cancel) or (isinstance(message, Show) and message.end):
            for task in self._tasks.pop(message.request, ()):
                task.cancel()
            for request, index in tuple(self._open) if isinstance(message, Show) else ():
                if request == message.request:
                    self._hear(Failed(request, index, "Interrupted", "it was interrupted"))

    def end(self) -> None:
        """Cancel all work. Called from another thread."""
        assert self._loop is not None, "it was started"

        def cancel() -> None:
            if self._asking is not None:
                self._asking.cancel()
            for task in [task for tasks in self._tasks.values() for task in tasks]:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _begin(self, request: str, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None, "it was started"
        task = self._loop.create_task(work)
        self._tasks.setdefault(request, set()).add(task)

        def ended(task: asyncio.Task[None]) -> None:
            tasks = self._tasks.get(request, set())
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(request, None)

        task.add_done_callback(ended)

    async def _ask(self) -> None:
        """Wait for the first replica to answer."""
        while True:
            with suppress(*LOST):
                self._hear(Ready(await self._handle.found.remote()))
                return
            await asyncio.sleep(0.5)

    async def _draw(self, job: Job) -> None:
        place, lost = (job.request, job.index), ""
        self._open[place] = False
        try:
            for _ in range(ATTEMPTS):
                try:
                    async for message in self._drawn(job):
                        if isinstance(message, Lost):
                            lost = message.what
                            break
                        self._say(job, message)
                        if isinstance(message, Drawn | Failed):
                            return
                except LOST as error:
                    lost = f"its replica was lost ({type(error).__name__})"
                except TaskCancelledError:  # by Ray Serve, when the replica shuts down
                    lost = "its replica was shut down"
                self._open[place] = False
            self._hear(Failed(job.request, job.index, "ReplicaLost", f"{lost}, {ATTEMPTS} times"))
        finally:
            self._open.pop(place, None)
            self._count(())

    async def _drawn(self, job: Job) -> Any:
        """Make one attempt, under a new request id: images of one request may meet on a replica."""
        known = loras_id(job)
        handle = self._handle.options(stream=True, multiplexed_model_id=known)
        response = handle.draw.remote(replace(job, request=uuid.uuid4().hex), known, tuple(self._forgotten))
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()

    def _say(self, job: Job, message: Message) -> None:
        if isinstance(message, Turned):
            self._memory = message.memory
            self._count(message.batches)
            return
        if isinstance(message, Begun):
            self._open[job.request, job.index] = True
            self._count(())
        if isinstance(message, OfImage):
            self._hear(replace(message, request=job.request, index=job.index))

    def _count(self, batches: tuple[tuple[int, int, float], ...]) -> None:
        """Report running and queued images of all replicas; each replica knows only its own."""
        drawing = sum(self._open.values())
        self._hear(Turned(batches, drawing, len(self._open) - drawing, self._memory))
