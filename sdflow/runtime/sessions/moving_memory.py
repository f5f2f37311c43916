"""GPU memory whose content can be evicted, to the host or to be read from its file again, and restored at the same addresses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sdflow.machine.cuda_memory import AddressRange
from sdflow.machine.memory import available_bytes

if TYPE_CHECKING:
    import torch

HOST_SHARE = 0.5
"""Maximum fraction of the host's free memory for values that left a device."""


class MovingMemory:
    """Memory for values that never change. size: bytes. device: in torch's notation. read: writes the values into a uint8
    tensor of that size on the device, from the given byte on; earlier bytes are already there."""

    def __init__(self, size: int, device: str, read: Callable[[torch.Tensor, int], None]) -> None:
        import torch

        self._host: torch.Tensor | None = None
        self._device = device
        index = torch.device(device).index
        self._range = AddressRange(size, torch.cuda.current_device() if index is None else index)
        self._read, self._values = read, size
        self.size = self._range.size

    @property
    def missing(self) -> int:
        """Bytes that are not on the device."""
        return self.size - self._range.filled

    def bytes(self) -> torch.Tensor:
        """The values as uint8; only valid while none are missing."""
        return self._range.bytes()[: self._values]

    def bring(self) -> None:
        """Load the missing values; the copy is queued on torch's current stream if they are in page-locked memory."""
        import torch

        begin = self._range.filled
        try:
            while self.missing:
                at = self._range.filled
                piece = slice(at, min(at + self._range.fill_piece(), self._values))
                if self._host is not None:  # copied while memory for the next piece is mapped
                    self.bytes()[piece].copy_(self._host[piece], non_blocking=True)
            if self._host is None:
                self._read(self.bytes(), begin)
        except BaseException:  # do not treat partial content as the values
            torch.cuda.synchronize(self._device)
            self._range.empty()
            raise

    def remove(self, wanted: int) -> None:
        """Free at least this many bytes of device memory, or all. The first time, the values are copied to page-locked host
        memory if there is enough; otherwise they are read from their file later."""
        if self._host is None and not self.missing and self._values < HOST_SHARE * available_bytes():
            self._host = page_locked(self._values)
            if self._host is not None:
                self._host.copy_(self.bytes())
        self._range.empty(wanted)

    def __del__(self) -> None:
        if self._host is not None and not sys.is_finalizing():
            unlock(self._host, self._device)


def unlock(memory: torch.Tensor, device: str) -> None:
    """Unlock memory from `page_locked` before it is freed. device: the one that reads it."""
    import torch

    torch.cuda.synchronize(device)  # a copy may still be reading it
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def page_locked(size: int) -> torch.Tensor | None:
    """Return page-locked memory of exactly this size (torch's allocator rounds up to a power of two), or None if
    unavailable."""
    import torch

    memory = torch.empty(size, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    if int(status) == 0:
        return memory
    with suppress(RuntimeError):  # the next launch reports and clears the failure
        torch.zeros(1, device="cuda").add_(1)
    return None
