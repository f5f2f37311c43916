"""The process that draws, seen from the one that answers: started, told, heard, and started again when it dies."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from sdflow.serve.engine.pulse import Pulse, Watchdog
from sdflow.serve.jobs import Cancel, End, Job, Lost, Message, Ready, WorkerOptions
from sdflow.serve.worker.worker import work

WAITS = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds before a start, by how many ended in a row before they were ready; the last for all further ones."""

END_SECONDS = 5.0


class WorkerLine:
    """One worker at a time. hear: receives its messages, and `Lost` when it ends, from another thread."""

    def __init__(self, options: WorkerOptions, hear: Callable[[Message], None]) -> None:
        self._options, self._hear = options, hear
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
        self._process: Any = None
        self._messages: SimpleQueue[Job | Cancel | End | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="worker line", daemon=True)

    def start(self) -> None:
        """Start the worker, and another whenever one ends."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def send(self, message: Job | Cancel) -> None:
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


def _pass_on(messages: SimpleQueue[Job | Cancel | End | None], connection: Connection) -> None:
    """Everything up to the first None."""
    with suppress(OSError):  # the worker is gone, which whoever reads from it finds out
        while (message := messages.get()) is not None:
            connection.send(message)
