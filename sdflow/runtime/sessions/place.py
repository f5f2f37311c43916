"""A device and the single stream of its work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import TargetUnavailableError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """A device. device: in torch's notation: "cpu", "cuda" (the first GPU), or "cuda:1". stream: the single stream for
    all work on it, None on the CPU."""

    device: str
    stream: Any = None

    @property
    def kind(self) -> str:
        """The type of device, "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def index(self) -> int:
        """Number of the GPU; 0 on the CPU."""
        return int(self.device.partition(":")[2] or 0)

    def selected(self) -> AbstractContextManager[None]:
        """Make this torch's and CUDA's current device in this thread. ONNX Runtime changes it whenever it creates or
        runs a session, and does not restore it."""
        import torch

        return nullcontext() if self.stream is None else torch.cuda.device(self.index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make torch queue its work on the stream, after earlier work; later work waits for it."""
        import torch

        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.index)
        if outer == self.stream:
            with self.selected():
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


def device_name(kind: str, index: int) -> str:
    """Return torch's name of a device. There is one CPU."""
    return f"{kind}:{index}" if index and kind != "cpu" else kind


def place(device: str) -> Place:
    """Return this process's only place for the device, even if several threads ask at once: two streams would not wait for
    each other. Raises TargetUnavailableError if there is no such device."""
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
    index, count = Place(device).index, torch.cuda.device_count()
    if index >= count:
        raise TargetUnavailableError(
            f"torch sees {count} CUDA device{'s' if count > 1 else ''}, so there is no {device}",
            where=device,
            remedy="Use fewer devices, or list more of them in CUDA_VISIBLE_DEVICES.",
        )
    return Place(device, torch.cuda.Stream(index))
