"""The process that draws. It is apart from the one that answers, so that a crash takes no connection with it.

It gets jobs over a pipe and gives back what happens to them (`sdflow.serve.jobs`). It ends when the pipe does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING

from sdflow.errors import SdflowError
from sdflow.processes.workers import deny_network
from sdflow.serve.engine.pulse import Pulse, Pulses
from sdflow.serve.jobs import Cancel, End, Job, Lost, Message, Ready, WorkerOptions

if TYPE_CHECKING:
    from sdflow.serve.engine.engine import Engine
    from sdflow.serve.engine.lanes import Lanes, Tell
    from sdflow.serve.engine.loading import LoadedLane
    from sdflow.serve.engine.waiting import Waiting
    from sdflow.serve.worker.ready_pipelines import ReadyPipelines


def work(connection: Connection, options: WorkerOptions) -> None:
    """Load the pipelines, say so, and draw until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started it ends it in order
        signal.signal(number, signal.SIG_IGN)
    deny_network()
    sender = Sender(connection)
    pulses = Pulses(sender.send)
    try:
        _draw(connection, options, sender.send, pulses)
    except SdflowError as error:
        sender.send(Lost(type(error).__name__, error.what, error.where, error.remedy))
    sender.end()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers: some libraries send their telemetry there


class Sender:
    """Sends to the server, from a thread of its own: an image is longer than what a pipe takes at once, and who draws does not
    wait until the server has read it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[Message | Pulse | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="to the server", daemon=True)
        self._thread.start()

    def send(self, message: Message | Pulse) -> None:
        """In the order in which it is called."""
        self._messages.put(message)

    def end(self) -> None:
        """When all is sent, or nobody listens any more."""
        self._messages.put(None)
        self._thread.join()

    def _pass_on(self) -> None:
        with suppress(OSError):  # nobody is there any more: who reads from the pipe ends the drawing
            while (message := self._messages.get()) is not None:
                self._connection.send(message)


def _draw(connection: Connection, options: WorkerOptions, tell: Tell, pulses: Pulses) -> None:
    import torch

    from sdflow.serve.engine.lanes import Lanes
    from sdflow.serve.engine.loading import Room, load_lanes, patience_of
    from sdflow.serve.loras.live_loras import SharedValues
    from sdflow.serve.worker.ready_pipelines import ReadyPipelines

    # What torch computes here is small. Each thread that draws would have more of torch's own, which spin beside ONNX Runtime's.
    torch.set_num_threads(1)
    loaded = load_lanes(options)
    room = Room.measured(loaded)
    lanes = Lanes(tell, room.share)
    values = {name: SharedValues() for name in options.pipelines}
    for lane in loaded:
        found = {
            name: ReadyPipelines(
                options.pipelines[name],
                pipeline,
                options.cache,
                options.lora_memory // len(loaded),
                values[name],
                lanes.look_again,
            )
            for name, pipeline in lane.pipelines.items()
        }
        lanes.add(partial(_engine, lane, found, options))
    about = {
        name: {
            "batch_seconds": loaded[0].seconds[name],
            "alone": pipeline.why_alone,
            "lanes": len(loaded),
            "max_pixels": room.most[name],
        }
        for name, pipeline in loaded[0].pipelines.items()
    }
    pulses.watch(lanes, patience_of(loaded[0], options))
    tell(Ready(about))
    threading.Thread(target=_listen, args=(connection, lanes), name="from the server", daemon=True).start()
    lanes.run()


def _engine(
    lane: LoadedLane, found: Mapping[str, ReadyPipelines], options: WorkerOptions, waiting: Waiting, tell: Tell
) -> Engine:
    """Of one lane, with what the first request with LoRAs would wait for, where such will come."""
    from sdflow.serve.engine.engine import Engine
    from sdflow.serve.engine.loading import warm, warm_up_job

    if options.loras:
        for name, pipeline in lane.pipelines.items():
            sizes = list(lane.seconds[name])
            found[name].prepare(warm_up_job(name, pipeline), sizes, partial(warm, name, options=options))
    return Engine(
        lambda job: found[job.pipeline].find(job),
        lane.seconds,
        tell,
        ready=lambda job, begin: found[job.pipeline].ready(job, begin=begin),
        waiting=waiting,
    )


def _listen(connection: Connection, lanes: Lanes) -> None:
    """To what is to be drawn, until the pipe ends or the server says so."""
    with suppress(EOFError, OSError):
        while not isinstance(message := connection.recv(), End):
            if isinstance(message, Job):
                lanes.submit(message)
            elif isinstance(message, Cancel):
                lanes.cancel(message.request)
    lanes.end()
