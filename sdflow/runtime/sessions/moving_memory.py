"""Values on a CUDA device that can leave it for the host's memory, or be read anew, and come back to the same addresses."""

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
"""Of the host's free memory, what values that left a device may take."""


class MovingMemory:
    """size: bytes. device: as torch calls it. read: writes all of the values, which never change, into a tensor of uint8 of that
    size on the device."""

    def __init__(self, size: int, device: str, read: Callable[[torch.Tensor], None]) -> None:
        import torch

        self._host: torch.Tensor | None = None
        index = torch.device(device).index
        self._range = AddressRange(size, torch.cuda.current_device() if index is None else index)
        self._read, self._values = read, size
        self.size = self._range.size

    @property
    def present(self) -> bool:
        """Whether the values lie on the device."""
        return self._range.filled

    def bytes(self) -> torch.Tensor:
        """The values, uint8. Only while they are present."""
        return self._range.bytes()[: self._values]

    def bring(self) -> None:
        """Put the values on the device: queued on torch's current stream where they wait in page-locked memory."""
        import torch

        self._range.fill()
        try:
            if self._host is None:
                self._read(self.bytes())
            else:
                self.bytes().copy_(self._host, non_blocking=True)
        except BaseException:  # else what lies there would count as the values
            torch.cuda.synchronize()
            self._range.empty()
            raise

    def remove(self) -> None:
        """Give the device's memory back. The first time, the values are copied to page-locked memory of the host, if there is
        enough; else they are read anew."""
        if self._host is None and self._values < HOST_SHARE * available_bytes():
            self._host = _page_locked(self._values)
            if self._host is not None:
                self._host.copy_(self.bytes())
        self._range.empty()

    def __del__(self) -> None:
        if self._host is not None and not sys.is_finalizing():
            import torch

            torch.cuda.synchronize()  # it may be read yet
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())


def _page_locked(size: int) -> torch.Tensor | None:
    """Memory of exactly this size (torch's own allocator takes the next power of two); None where the system gives none."""
    import torch

    memory = torch.empty(size, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    if int(status) == 0:
        return memory
    with suppress(RuntimeError):  # the next launch reports the failure, and clears it
        torch.zeros(1, device="cuda").add_(1)
    return None
