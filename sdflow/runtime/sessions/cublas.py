"""How much of a CUDA device's memory cuBLAS takes for each session.

On Hopper every handle has 32 MiB of workspace, some have it several times over, and each session has handles of its own:
0.6 GB for the sessions of Stable Diffusion 1.5. With 4 MiB they take 0.1 GB, and no run is slower (benchmarks/gpu/RESULTS.md).
cuBLAS reads the variable once in a process, when its first handle is made: where torch made it, nothing is saved.
https://docs.nvidia.com/cuda/cublas/#cublassetworkspace
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":4096:1"
"""One piece of 4096 KiB."""

_lock, _inside = threading.Lock(), 0


@contextmanager
def small_workspaces() -> Iterator[None]:
    """Handles that are made in here have small workspaces, unless the variable is set already: the choice is then the
    user's. Outside, torch's own handles keep what torch gives them. Threads may be in here at the same time."""
    global _inside
    with _lock:
        ours = _inside > 0 or VARIABLE not in os.environ
        if ours:
            _inside += 1
            os.environ[VARIABLE] = SMALL
    try:
        yield
    finally:
        if ours:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    del os.environ[VARIABLE]
