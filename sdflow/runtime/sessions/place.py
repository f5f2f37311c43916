"""Where tensors lie, and the one stream of the work there."""

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
    """Where tensors lie. device: "cpu" or "cuda". stream: the one stream of all work on it, None on the CPU."""

    device: str
    stream: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Torch queues its work on the stream in here, behind what was queued before; what follows waits for it."""
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
        """Copy a value of the processor's memory, of any type and with one row for all, into a tensor that lies here. On a
        GPU that is queued: a copy from memory that may be moved would wait for all that was queued before."""
        if self.stream is not None:
            value = value.to(target.dtype).expand_as(target).contiguous().pin_memory()
        target.copy_(value, non_blocking=True)

    def placed(self, value: torch.Tensor) -> torch.Tensor:
        """The same value here. Queued as with `put`, where it is not on the device already."""
        if self.stream is None or value.device.type != "cpu":
            return value.to(self.device)
        return value.pin_memory().to(self.device, non_blocking=True)


_places: dict[str, Place] = {}
_placing = threading.Lock()


def place(device: str) -> Place:
    """The place of this name; there is one of each in a process, also when several threads ask first: two streams would
    not wait for each other. Raises TargetUnavailableError without a device."""
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
            "torch sees no CUDA device", where=device, remedy="Install a CUDA build of torch, and the driver it wants."
        )
    return Place(device, torch.cuda.Stream())
