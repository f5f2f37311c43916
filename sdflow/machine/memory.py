"""How much memory can still be had: of the host, within the limits of its container, or of a CUDA device."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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
    import psutil

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
