"""Whose weights lie on a device: all that fit; where not all do, those that were not used for the longest time make room.

Weights that leave wait in the host's memory, page-locked where there is enough of it, else in their file. Their addresses on the
device stay (`sdflow.machine.cuda_memory`), so that sessions and captured graphs last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from sdflow.machine.memory import available_bytes

Keep = Literal["all", "fit"]
"""Whether all weights stay on a device, or take turns there where they do not fit together."""

HEADROOM = 1 << 29
"""Bytes that stay free on the device when weights come: for a session's first run, and what the driver takes beside it."""


class Movable(Protocol):
    """Weights that can leave a device and come back. size: bytes of the device."""

    size: int

    @property
    def present(self) -> bool:
        """Whether they lie on the device."""

    def bring(self) -> None:
        """Put them there; queued work that comes later finds them."""

    def remove(self) -> None:
        """Take them away. All queued work is done."""


class Residency:
    """The movable weights of one device.

    limit: bytes that the process may take there; None: all that is free. free: bytes that are, without a limit. wait: returns
    when all queued work is done.
    """

    def __init__(self, free: Callable[[], int], wait: Callable[[], None], limit: int | None = None) -> None:
        self._free, self._wait = free, wait
        self._lock = threading.RLock()
        self._present: OrderedDict[Movable, None] = OrderedDict()
        self._staying: set[Movable] = set()
        self.limit, self._at_first = limit, free()

    def room(self) -> int:
        """Bytes that can still be taken."""
        free = self._free()
        return free if self.limit is None else min(free, self.limit - (self._at_first - free))

    @contextmanager
    def using(self, weights: Movable) -> Iterator[None]:
        """They are on the device in here, and stay until the work is done that is queued in here."""
        with self._lock:
            if not weights.present:
                self.make_room(weights.size + HEADROOM, weights)
                weights.bring()
            if weights not in self._staying:
                self._present[weights] = None
                self._present.move_to_end(weights)
            yield

    def make_room(self, wanted: int, user: Movable | None = None) -> None:
        """Let weights leave, but those of `user`, until so many bytes are free, or there is nothing left to leave."""
        with self._lock:
            for each in [each for each in self._present if each is not user]:
                if self.room() >= wanted:
                    return
                self._wait()
                each.remove()
                del self._present[each]

    def stay(self, weights: Movable) -> None:
        """They are brought, and never leave again: somebody reads them without `using`."""
        with self._lock, self.using(weights):
            self._present.pop(weights, None)
            self._staying.add(weights)

    def forget(self, weights: Movable) -> None:
        """They are of no use any more."""
        with self._lock:
            self._present.pop(weights, None)
            self._staying.discard(weights)


@dataclass(frozen=True)
class Resident:
    """Weights that a session reads, and who sees that they are there when it does."""

    residency: Residency
    weights: Movable

    def using(self) -> AbstractContextManager[None]:
        """As of `Residency`."""
        return self.residency.using(self.weights)


_residencies: dict[str, Residency] = {}
_making = threading.Lock()


def residency(device: str, limit: int | None = None) -> Residency:
    """That of a device, of which there is one in a process. limit: from now on, if it is given."""
    with _making:
        if device not in _residencies:
            _residencies[device] = Residency(lambda: available_bytes(device), lambda: _synchronize(device), limit)
        elif limit is not None:
            _residencies[device].limit = limit
        return _residencies[device]


def _synchronize(device: str) -> None:
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
