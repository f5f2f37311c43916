"""A device and the single stream of its work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import TargetUnavailableError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """A device. device: "cpu" or "cuda". stream: the single stream for all work on it, None on the CPU."""

    device: str
    stream: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make torch queue its work on the stream, after earlier work; later work waits for it."""
        import torch

        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream()
        if outer == self.stream:
            yield
            return
        self.stream.wait_stream(outer)
        with torch.cuda.stream(self.stream):
            yield
        outer.wait_stream(self.stream)

    def put(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a host value, of any type and possibly with one row for all, into a tensor on this device. On a GPU this
        is queued: a copy from pageable memory would wait for all earlier work."""
        if self.stream is not None:
            value = value.to(target.dtype).expand_as(target).contiguous().pin_memory()
        target.copy_(value, non_blocking=True)

    def placed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value on this device; queued like `put`, unless it is already there."""
        if self.stream is None or value.device.type != "cpu":
            return value.to(self.device)
        return value.pin_memory().to(self.device, non_blocking=True)


_places: dict[str, Place] = {}
_placing = threading.Lock()


def place(device: str) -> Place:
    """Return the process's only place for this device, also if several threads ask first: two streams would not wait
    for each other. Raises TargetUnavailableError without a device."""
    with _placing:
        if device not in _places:
            _places[device] = _make_place(device)
        return _places[device]


def _make_place(device: str) -> Place:
    import torch

    if device == "cpu":
        return Place(device)
    if not torch.cuda.is_available():
        raise TargetUnavailableError(
            "torch sees no CUDA device", where=device, remedy="Install a CUDA build of torch and a matching driver."
        )
    return Place(device, torch.cuda.Stream())
