"""Available memory of the host (within its container's limit) or of a CUDA device, and returning freed memory."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

HOST = "cpu"  # torch's name of the host's memory

CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For cgroup v2 and v1: files of the limit, the usage and the statistics, and the key of reclaimable page cache."""


def available_bytes(device: str = HOST) -> int:
    """Return the bytes that this process can allocate without swapping; on CUDA, the driver's free bytes.

    Memory held by a session's arena counts as used, even if the next run can reuse it.
    """
    if device != HOST:
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = _left_of_container(CGROUPS)
    return free if limit is None else min(free, limit)


def device_bytes(device: str) -> int:
    """Return the size of a CUDA device's memory."""
    import torch

    return int(torch.cuda.mem_get_info(device)[1])


def _left_of_container(root: Path) -> int | None:
    """Return the bytes left of the container's limit; None without a limit or a readable control group."""
    for limit, used, statistics, cached in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            most = int((root / limit).read_text())
            counts = dict(line.split() for line in (root / statistics).read_text().splitlines())
            return max(0, most - int((root / used).read_text()) + int(counts.get(cached, 0)))
    return None


def free_page_locked() -> None:
    """Return the page-locked memory that torch keeps for later tensors, whose sizes it rounds up to powers of two, to the
    system."""
    import torch

    public = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 lacks it
    (torch._C._host_emptyCache if public is None else public)()


def trim() -> None:
    """Return glibc's free memory to the system. Does nothing elsewhere."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # musl lacks it
            libc.malloc_trim(0)


def return_freed_memory() -> None:
    """Make glibc return memory freed from now on, overriding the environment. Does nothing elsewhere."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl lacks it
            trim_threshold, mmap_threshold, mmap_max = -1, -3, -4
            for option, value in ((mmap_max, 1 << 16), (mmap_threshold, 1 << 20), (trim_threshold, 1 << 20)):
                libc.mallopt(option, value)


def let_go(tensor: torch.Tensor) -> None:
    """Page out a tensor that is a memory-mapped file; the next access reads it again. Linux only.

    A tensor with memory of its own keeps its content.
    """
    if sys.platform == "linux":
        import ctypes
        import mmap

        page, pageout = mmap.PAGESIZE, 21  # MADV_PAGEOUT, Linux 5.4; older kernels reject it harmlessly
        begin = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        if end > begin:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pageout)
