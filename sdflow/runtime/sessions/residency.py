"""Manage which weights are on a GPU: as many as fit; the least recently used are evicted, no more than necessary.

Evicted weights wait in page-locked host memory, or are read from their file again if there is too little. Their device
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
"""Bytes kept free on the device when weights are loaded: for a session's first run and for the driver."""

MARGIN = 1 << 28
"""Bytes kept free besides HEADROOM when weights are streamed: streaming a little more costs less than running out of memory.
With twice as much, FLUX.2-klein left 0.89 GB of the device unused."""


def reserved(working: int) -> int:
    """Bytes of a device that must stay free besides the weights of one submodel; a submodel that leaves less is streamed if
    possible. working: the denoiser's working memory, which its sessions keep."""
    return HEADROOM + MARGIN + working


class Movable(Protocol):
    """Weights that can be evicted from a device, also in part, and loaded again. size: in bytes on the device."""

    size: int

    @property
    def missing(self) -> int:
        """Bytes that are not on the device."""

    def bring(self) -> None:
        """Load what is missing, ahead of any work queued later."""

    def remove(self, wanted: int) -> None:
        """Evict at least this many bytes, or all if there are fewer. Call it when all queued work is done."""


class Residency:
    """The movable weights of one device.

    limit: bytes that this process may use there beyond what it uses now, which is CUDA's context; None: all free memory.
    free: returns the free bytes. wait: waits until all queued work is done. used: returns the bytes that this process
    uses, or None if the driver does not report them; then allocations of other processes count too.
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
        """Return the bytes that would be available if everything were evicted."""
        with self._lock:
            return self.room() + sum(each.size - each.missing for each in self._present)

    @contextmanager
    def using(self, weights: Movable, working: int | None = None) -> Iterator[None]:
        """Keep the weights on the device within this context, and until the work queued in it is done. working: bytes that
        this work allocates, for which other weights are evicted; None: its memory is already allocated."""
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
        """Evict weights other than `user`'s until this many bytes are free or nothing is left to evict. The last ones are
        evicted only in part, because what stays need not be loaded again."""
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
    """Return this process's Residency of a device. limit: if given, applies from now on."""
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
