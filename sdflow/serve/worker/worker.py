"""The worker process generates images apart from the server, so that a crash does not drop connections.

It receives jobs over a pipe, sends back messages (`sdflow.serve.jobs`) and ends with the pipe. `WorkerLine` controls
it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sdflow.errors import SdflowError
from sdflow.processes.in_worker import deny_network
from sdflow.serve.engine.pulse import Pulse, Pulses, Watchdog
from sdflow.serve.jobs import Cancel, Drop, Forget, Job, Load, Loaded, Lost, Message, Order, Ready, Show, WorkerOptions
from sdflow.serve.log import ROTATED, log_as_json, log_line

if TYPE_CHECKING:
    from sdflow.serve.engine.lanes import Tell
    from sdflow.serve.worker.stock import Stock

WAITS = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds before a restart, by the number of consecutive failed starts; the last one repeats."""

END_SECONDS = 5.0


class Sender(threading.Thread):
    """Sends messages over a pipe in order, until the first None, without blocking the caller on a full pipe."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(name="sender", daemon=True)
        self._connection, self._messages = connection, SimpleQueue[Any]()
        self.send = self._messages.put
        self.start()

    def run(self) -> None:
        with suppress(OSError):  # the other side is gone; the pipe's reader handles that
            while True:
                self._connection.send(message := self._messages.get())
                if message is None:
                    return


def work(connection: Connection, options: WorkerOptions, output: Connection | None = None) -> None:
    """Load the pipelines, report ready and run jobs until the pipe closes. output: receives standard error."""
    if output is not None:
        os.dup2(output.fileno(), 2)
    os.environ.pop(ROTATED, None)  # only the server rotates the file
    log_as_json()
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process shuts it down
        signal.signal(number, signal.SIG_IGN)
    deny_network()
    sender = Sender(connection)
    pulses = Pulses(sender.send)
    try:
        _draw(connection, options, sender.send, pulses)
    except SdflowError as error:
        sender.send(Lost(type(error).__name__, error.what, error.where, error.remedy))
    sender.send(None)
    sender.join()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers: some libraries send telemetry in theirs


def _draw(connection: Connection, options: WorkerOptions, tell: Tell, pulses: Pulses) -> None:
    import torch

    from sdflow.machine.lean_imports import import_diffusers_alone
    from sdflow.serve.engine.loading import load_lanes, patience_of, with_room
    from sdflow.serve.worker.stock import Stock

    # torch does little work here, and its threads, which every lane would start, spin on ONNX Runtime's cores.
    torch.set_num_threads(1)
    import_diffusers_alone()  # this process compiles nothing
    loaded = load_lanes(with_room(options))
    stock = Stock(options, loaded, tell)
    about = stock.load_others()
    pulses.watch(stock.lanes, patience_of(loaded[0], options, stock.room.own), lambda: stock.loading)
    tell(Ready(about))
    threading.Thread(target=_listen, args=(connection, stock), name="from the server", daemon=True).start()
    stock.lanes.run()


def _listen(connection: Connection, stock: Stock) -> None:
    """Execute orders until the pipe closes or None arrives."""
    with suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            if isinstance(message, Job):
                stock.submit(message)
            elif isinstance(message, Cancel):
                stock.lanes.cancel(message.request)
            elif isinstance(message, Show):
                stock.lanes.show(message)
            elif isinstance(message, Forget):
                stock.forget(message.path)
            else:
                stock.do(message)
    stock.lanes.end()


class WorkerLine:
    """Runs one worker at a time. hear: receives its messages, and `Lost` when it ends, from another thread."""

    def __init__(self, options: WorkerOptions, hear: Callable[[Message], None]) -> None:
        self._options, self._hear = options, hear
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
        self._process: Any = None
        self._send: Callable[[Order | None], None] = lambda message: None
        self._newest = dict[str, Load | Drop]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="worker line", daemon=True)
        self.start = self._thread.start

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return None if self._process is None else self._process.pid

    def send(self, message: Order) -> None:
        """Queue a message without waiting for the worker to read it. Messages to a dead worker are lost."""
        if isinstance(message, Load | Drop):
            self._newest[message.name] = message
        if isinstance(message, Drop):
            rest = {name: folder for name, folder in self._options.pipelines.items() if name != message.name}
            self._options = replace(self._options, pipelines=rest)
        self._send(message)

    def end(self) -> None:
        """End the worker without starting another."""
        self._ended.set()
        process = self._process
        if process is not None:
            self._send(None)
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
        """Run one worker. Return why it ended, unless already reported, and whether it was ready before."""
        ours, theirs = self._context.Pipe()
        heard, output = self._context.Pipe(duplex=False) if sys.platform != "win32" else (None, None)
        arguments = (theirs, self._options, output)
        process = self._context.Process(target=work, args=arguments, name="sdflow worker", daemon=True)
        process.start()
        theirs.close()
        if heard is not None and output is not None:
            output.close()
            threading.Thread(target=_pass_on_output, args=(heard,), name="worker's output", daemon=True).start()
        self._process, self._send = process, Sender(ours).send
        ready, said, given_up = False, None, threading.Event()

        def give_up(lost: Lost) -> None:
            given_up.set()
            process.kill()
            self._hear(lost)  # at once: a process that hangs in a driver may not die yet

        watchdog = Watchdog(give_up)
        with suppress(EOFError, OSError):
            while (message := ours.recv()) is not None:
                watchdog.hear(message)
                if isinstance(message, Lost):
                    said = message
                elif not isinstance(message, Pulse) and not given_up.is_set():
                    ready = ready or isinstance(message, Ready)
                    if isinstance(message, Loaded):
                        self._note_loaded(message)
                    self._hear(message)
        watchdog.ended.set()
        self._send(None)
        process.join()
        if given_up.is_set():
            return None, ready
        status = process.exitcode
        words = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        return said or Lost("WorkerEnded", words), ready

    def _note_loaded(self, loaded: Loaded) -> None:
        """Make the next worker load this pipeline too, unless it was removed while loading."""
        order = self._newest.get(loaded.name)
        if loaded.found is not None and isinstance(order, Load) and order.number == loaded.number:
            self._options = replace(self._options, pipelines={**self._options.pipelines, loaded.name: loaded.folder})


def _pass_on_output(heard: Connection) -> None:
    """Forward the worker's output as JSON lines."""
    with heard, os.fdopen(os.dup(heard.fileno()), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("{") and line.endswith("}\n"):
                with suppress(OSError):
                    sys.stderr.write(line)
                    sys.stderr.flush()
            elif line.strip():
                log_line("output", text=line.rstrip())
