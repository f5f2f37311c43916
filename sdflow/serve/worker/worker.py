"""The process that draws. It is apart from the one that answers, so that a crash takes no connection with it.

It gets jobs over a pipe and gives back what happens to them (`sdflow.serve.jobs`). It ends when the pipe does.
Here is also the process as the one that answers sees it: started, told, heard, started again when it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sdflow.errors import SdflowError
from sdflow.processes.workers import deny_network
from sdflow.serve.engine.pulse import Pulse, Pulses, Watchdog
from sdflow.serve.jobs import Cancel, End, Job, Lost, Message, Order, Ready, Show, WorkerOptions

if TYPE_CHECKING:
    from sdflow.serve.engine.engine import Engine
    from sdflow.serve.engine.lanes import Lanes, Tell
    from sdflow.serve.engine.loading import LoadedLane
    from sdflow.serve.engine.waiting import Waiting
    from sdflow.serve.worker.ready_pipelines import ReadyPipelines

WAITS = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds before a start, by how many ended in a row before they were ready; the last for all further ones."""

END_SECONDS = 5.0


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
            elif isinstance(message, Show):
                lanes.show(message)
    lanes.end()


class WorkerLine:
    """One worker at a time. hear: receives its messages, and `Lost` when it ends, from another thread."""

    def __init__(self, options: WorkerOptions, hear: Callable[[Message], None]) -> None:
        self._options, self._hear = options, hear
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
        self._process: Any = None
        self._messages: SimpleQueue[Order | End | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="worker line", daemon=True)

    def start(self) -> None:
        """Start the worker, and another whenever one ends."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def send(self, message: Order) -> None:
        """Without waiting: a worker that computes reads later. What is for one that is gone, nobody gets."""
        self._messages.put(message)

    def end(self) -> None:
        """End the worker, and start no other."""
        self._ended.set()
        process = self._process
        if process is not None:
            self._messages.put(End())
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()

    def _keep(self) -> None:
        failures = 0
        while not self._ended.wait(WAITS[min(failures, len(WAITS) - 1)]):
            lost, was_ready = self._run()
            failures = 0 if was_ready else failures + 1
            if lost is not None and not self._ended.is_set():
                self._hear(lost)

    def _run(self) -> tuple[Lost | None, bool]:
        """One worker from its start to its end: why it ended, unless that was told, and whether it was ready before."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self._options), name="sdflow worker", daemon=True)
        process.start()
        theirs.close()
        self._process, self._messages = process, SimpleQueue()
        threading.Thread(target=_pass_on, args=(self._messages, ours), name="to the worker", daemon=True).start()
        ready, said, given_up = False, None, threading.Event()

        def give_up(lost: Lost) -> None:
            given_up.set()
            process.kill()
            self._hear(lost)  # now: what hangs in a driver ends only when that lets it

        watchdog = Watchdog(give_up)
        try:
            while True:
                message: Message | Pulse = ours.recv()
                watchdog.hear(message if isinstance(message, Pulse) else None)
                if isinstance(message, Lost):
                    said = message
                elif not isinstance(message, Pulse) and not given_up.is_set():
                    ready = ready or isinstance(message, Ready)
                    self._hear(message)
        except (EOFError, OSError):
            pass
        watchdog.end()
        self._messages.put(None)
        process.join()
        if given_up.is_set():
            return None, ready
        status = process.exitcode
        words = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return said or Lost("WorkerEnded", f"it ended with {words}"), ready


def _pass_on(messages: SimpleQueue[Order | End | None], connection: Connection) -> None:
    """Everything up to the first None."""
    with suppress(OSError):  # the worker is gone, which whoever reads from it finds out
        while (message := messages.get()) is not None:
            connection.send(message)
