"""How much memory can still be had: of the host, within the limits of its container, or of a CUDA device; giving it back."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

HOST = "cpu"
"""What torch calls the processor's memory."""

CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of version 2 and 1: the limit, what is used, and of that what the kernel gives back when it is short: cached files."""


def available_bytes(device: str = HOST) -> int:
    """Bytes that this process can still take without swapping. device: as torch calls it; on CUDA, what the driver calls free.

    What a session's arena holds counts as used, also where its next run finds room in it.
    """
    if device != HOST:
        import torch

        return int(torch.cuda.mem_get_info()[0])
    free = int(psutil.virtual_memory().available)
    limit = _left_of_container(CGROUPS)
    return free if limit is None else min(free, limit)


def _left_of_container(root: Path) -> int | None:
    """What is left of the container's limit; None where there is none, or no control group can be read."""
    for limit, used, statistics, cached in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            most = int((root / limit).read_text())
            counts = dict(line.split() for line in (root / statistics).read_text().splitlines())
            return max(0, most - int((root / used).read_text()) + int(counts.get(cached, 0)))
    return None


def trim() -> None:
    """Have glibc give back to the system what is free. Elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # musl has none
            libc.malloc_trim(0)


def return_freed_memory() -> None:
    """Have glibc give what is freed from now on back to the system, whatever the environment says. Elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl has none
            trim_threshold, mmap_threshold, mmap_max = -1, -3, -4
            for option, value in ((mmap_max, 1 << 16), (mmap_threshold, 1 << 20), (trim_threshold, 1 << 20)):
                libc.mallopt(option, value)


def let_go(tensor: torch.Tensor) -> None:
    """Drop the pages of a tensor that is a map of a file from memory; they are read again when they are used.

    A tensor with memory of its own stays as it is, and so does any outside of Linux.
    """
    if sys.platform == "linux":
        import ctypes
        import mmap

        page, pageout = mmap.PAGESIZE, 21  # MADV_PAGEOUT, of Linux 5.4; older ones refuse it, and nothing is lost
        begin = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        if end > begin:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pageout)
