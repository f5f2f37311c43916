"""Keep weights on a device as far as they fit; evict the least recently used, and no more of them than necessary.

Evicted weights are kept in host memory, page-locked if there is enough, or reread from their file. Their device
addresses stay reserved (`sdflow.machine.cuda_memory`), so sessions and captured graphs remain valid.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from sdflow.machine.device_memory import process_bytes
from sdflow.machine.memory import available_bytes

Keep = Literal["all", "fit"]
"""Whether all weights stay on a device, or take turns if they do not fit together."""

HEADROOM = 1 << 29
"""Bytes kept free on the device when weights are loaded: for a session's first run, and the driver's own use."""

MARGIN = 1 << 28
"""Bytes kept free besides HEADROOM when weights are streamed, since one more byte streamed costs less than a failure. With
twice as much, FLUX.2-klein left 0.89 GB of the device unused."""


def reserved(working: int) -> int:
    """Bytes of a device that weights which take turns leave free; larger ones are streamed where possible. working: the
    denoiser's working memory, which its sessions keep."""
    return HEADROOM + MARGIN + working


class Movable(Protocol):
    """Weights that can leave a device, also in part, and come back. size: in device bytes."""

    size: int

    @property
    def missing(self) -> int:
        """Bytes of them that are not on the device."""

    def bring(self) -> None:
        """Load what is missing; work queued later finds it there."""

    def remove(self, wanted: int) -> None:
        """Evict at least this many bytes, or all. All queued work is done."""


class Residency:
    """The movable weights of one device.

    limit: bytes that this process may use there beyond what it uses now, which is CUDA's context; None: all free memory.
    free: returns the free bytes. wait: waits until all queued work is done. used: returns the bytes that this process
    uses, or None if the driver does not tell; then all that was allocated since counts, also by other processes.
    """

    def __init__(
        self,
        free: Callable[[], int],
        wait: Callable[[], None],
        limit: int | None = None,
        used: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._free, self._wait, self._used = free, wait, used
        self._lock = threading.RLock()
        self._present: OrderedDict[Movable, None] = OrderedDict()
        self._staying: set[Movable] = set()
        self.limit, self._free_first, self._used_first = limit, free(), used()

    def room(self) -> int:
        """Return the bytes that are still available."""
        free = self._free()
        if self.limit is None:
            return free
        used = self._used()
        if used is None or self._used_first is None:
            return min(free, self.limit - (self._free_first - free))
        return min(free, self.limit - (used - self._used_first))

    def reachable(self) -> int:
        """Return the bytes that are available once everything is evicted."""
        with self._lock:
            return self.room() + sum(each.size - each.missing for each in self._present)

    @contextmanager
    def using(self, weights: Movable, working: int | None = None) -> Iterator[None]:
        """Keep the weights on the device inside, and until the work queued inside is done. working: bytes that this work
        allocates, for which others are evicted; None: its memory is already allocated."""
        with self._lock:
            if missing := weights.missing:
                self.make_room(missing + HEADROOM + (working or 0), weights)
                weights.bring()
            elif working is not None:
                self.make_room(HEADROOM + working, weights)
            if weights not in self._staying:
                self._present[weights] = None
                self._present.move_to_end(weights)
            yield

    def make_room(self, wanted: int, user: Movable | None = None) -> None:
        """Evict weights, except `user`'s, until this many bytes are free or nothing is left to evict; of the last ones
        only as much as necessary, because what stays need not come back."""
        with self._lock:
            for each in [each for each in self._present if each is not user]:
                if self.room() >= wanted:
                    return
                self._wait()  # returns memory too
                if (lacking := wanted - self.room()) <= 0:
                    return
                each.remove(lacking)
                if each.missing >= each.size:
                    del self._present[each]

    def stay(self, weights: Movable) -> None:
        """Load weights and never evict them: they are read without `using`."""
        with self._lock, self.using(weights):
            self._present.pop(weights, None)
            self._staying.add(weights)

    def forget(self, weights: Movable) -> None:
        """Stop managing weights that are no longer needed."""
        with self._lock:
            self._present.pop(weights, None)
            self._staying.discard(weights)


@dataclass(frozen=True)
class Resident:
    """Weights that a session reads, and the Residency that manages them."""

    residency: Residency
    weights: Movable

    def using(self, working: int | None = None) -> AbstractContextManager[None]:
        """See `Residency.using`."""
        return self.residency.using(self.weights, working)


_residencies: dict[str, Residency] = {}
_making = threading.Lock()


def residency(device: str, limit: int | None = None) -> Residency:
    """Return the process's Residency of a device. limit: set from now on, if given."""
    with _making:
        if device not in _residencies:
            _residencies[device] = Residency(
                lambda: available_bytes(device), lambda: _synchronize(device), limit, lambda: process_bytes(device)
            )
        elif limit is not None:
            _residencies[device].limit = limit
        return _residencies[device]


def _synchronize(device: str) -> None:
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
