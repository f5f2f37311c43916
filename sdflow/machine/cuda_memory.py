"""CUDA memory that can be freed and mapped again at fixed addresses, by the driver's virtual memory management.

See https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html. Sessions and captured CUDA graphs read weights at
fixed addresses. vLLM's sleep mode frees weights in the same way.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from sdflow.errors import TargetUnavailableError

if TYPE_CHECKING:
    import torch

_PINNED, _DEVICE, _READ_AND_WRITE = (
    1,
    1,
    3,
)  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, ..._PROT_READWRITE


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


PIECE = 1 << 28
"""Bytes that are mapped at once, except for the last of a range."""


class AddressRange:
    """Device addresses; memory is mapped to them from the beginning on, in pieces. Not thread-safe.

    Newly mapped memory is uninitialized. Accessing unmapped addresses makes the device unusable for the process.
    """

    def __init__(self, size: int, device: int) -> None:
        """Reserve addresses. size: bytes, rounded up to the granularity. device: index.

        Raises TargetUnavailableError if the driver does not support it.
        """
        import torch

        torch.cuda.synchronize(device)  # makes the device's context current in this thread
        self._address, self._pieces = ctypes.c_uint64(), list[tuple[int, ctypes.c_uint64]]()
        self._location = _Location(_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.size = -(-size // granularity.value) * granularity.value
        self._piece = -(-PIECE // granularity.value) * granularity.value
        self.filled = 0
        """Bytes from the beginning to which memory is mapped."""
        nowhere = ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(self._address), *_sizes(self.size, 0), nowhere, ctypes.c_uint64(0))

    def fill_piece(self) -> int:
        """Map memory to the next piece of the addresses; return its size. Raises torch.cuda.OutOfMemoryError if the
        device has too little."""
        size, at, handle = min(self._piece, self.size - self.filled), self._at(self.filled), ctypes.c_uint64()
        no_flags = ctypes.c_uint64(0)
        _call("cuMemCreate", ctypes.byref(handle), *_sizes(size), ctypes.byref(self._properties), no_flags)
        access = _Access(self._location, _READ_AND_WRITE)
        with ExitStack() as undo:
            undo.callback(_call, "cuMemRelease", handle)
            _call("cuMemMap", at, *_sizes(size, 0), handle, no_flags)
            undo.callback(_call, "cuMemUnmap", at, *_sizes(size))
            _call("cuMemSetAccess", at, *_sizes(size), ctypes.byref(access), *_sizes(1))
            undo.pop_all()
        self._pieces.append((size, handle))
        self.filled += size
        return size

    def empty(self, wanted: int | None = None) -> None:
        """Return at least this many bytes, from the end of what is mapped, to the device; None: all. All work queued on
        them must have finished."""
        rest = 0 if wanted is None else max(0, self.filled - wanted)
        while self.filled > rest:
            size, handle = self._pieces.pop()
            self.filled -= size
            _call("cuMemUnmap", self._at(self.filled), *_sizes(size))
            _call("cuMemRelease", handle)

    def _at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(int(self._address.value) + offset)

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._address.value:
            import torch

            torch.cuda.synchronize(self._location.id)
            self.empty()
            _call("cuMemAddressFree", self._address, *_sizes(self.size))

    def bytes(self) -> torch.Tensor:
        """Return a uint8 tensor of all the addresses. It keeps them reserved, but not the memory mapped."""
        import torch

        assert self.filled, "torch asks the driver whose memory it is"
        return torch.as_tensor(_ArrayInterface(self, int(self._address.value)), device=f"cuda:{self._location.id}")


class _ArrayInterface:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, owner: AddressRange, address: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (owner.size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _sizes(*sizes: int) -> tuple[ctypes.c_size_t, ...]:
    return tuple(map(ctypes.c_size_t, sizes))


@cache
def _driver() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise TargetUnavailableError(
            f"NVIDIA's driver cannot be loaded: {error}", where="cuda", remedy="Install NVIDIA's driver."
        ) from error


def _call(function: str, *arguments: Any) -> None:
    driver = _driver()
    status = getattr(driver, function)(*arguments)
    if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
        import torch

        raise torch.cuda.OutOfMemoryError(f"{function}: the device has no memory left")
    if status:
        said = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(said))
        words = said.value.decode() if said.value else f"status {status}"
        raise TargetUnavailableError(
            f"{function}: {words}", where="cuda", remedy="Keep all weights on the device: --keep all."
        )
