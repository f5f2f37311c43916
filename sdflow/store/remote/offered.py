"""Results pushed by a thread of their own, beside the run that makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from sdflow import stop
from sdflow.artifact import Record
from sdflow.store.remote.up import Sent


class Offered:
    """push: one result; `shut`: whether pushing has no use any more; `failed`: gets what ends the thread."""

    def __init__(
        self,
        push: Callable[[Record, Callable[[], None]], Sent | None],
        shut: Callable[[], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self.abandoned = threading.Event()
        self._push, self._shut, self._failed = push, shut, failed
        self._records: SimpleQueue[Record] = SimpleQueue()
        self._seen: set[str] = set()  # offered before
        self._sent = Sent()
        self._waiting = 0
        self._idle = threading.Condition()
        self._pusher: threading.Thread | None = None

    def offer(self, record: Record) -> None:
        """Push it when those before it are pushed. One that was offered before is not pushed again."""
        with self._idle:
            if record.action.digest in self._seen:
                return
            self._seen.add(record.action.digest)
            self._waiting += 1
            self._records.put(record)
            if self._pusher is None:
                self._pusher = threading.Thread(target=self._run, name="remote cache push", daemon=True)
                self._pusher.start()

    def finish(self, meanwhile: Callable[[], None]) -> Sent:
        """Wait until all are pushed, or pushing has no use any more. Returns what was sent since the last time."""
        with self._idle:
            while self._waiting and not self._shut():
                self._idle.wait(0.1)
                meanwhile()
        sent, self._sent = self._sent, Sent()
        return sent

    def _run(self) -> None:
        while True:
            record = self._records.get()
            try:
                self._sent += self._push(record, self._go_on) or Sent()
            except (_Abandoned, stop.Stopped):  # the run's own end tells it
                self._seen.discard(record.action.digest)
            except Exception as error:  # noqa: BLE001  (else this thread ends, and `finish` waits for ever)
                self._failed(error)
            finally:
                with self._idle:
                    self._waiting -= 1
                    self._idle.notify_all()
            if self._shut():
                return

    def _go_on(self) -> None:
        if self.abandoned.is_set():
            raise _Abandoned


class _Abandoned(Exception):
    """The run has ended before its results were pushed."""
