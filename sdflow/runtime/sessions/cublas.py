"""Limit cuBLAS's workspace memory per session on CUDA devices.

On Hopper, each handle has 32 MiB of workspace, some several times that, and each session has its own handles: 0.6 GB
for the sessions of Stable Diffusion 1.5. With 4 MiB it is 0.1 GB, and no run is slower (benchmarks/gpu/RESULTS.md).
cuBLAS reads the variable once per process, when its first handle is created; if torch created that, nothing is saved.
https://docs.nvidia.com/cuda/cublas/#cublassetworkspace
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":4096:1"
"""One workspace of 4096 KiB."""

_lock, _inside = threading.Lock(), 0


@contextmanager
def small_workspaces() -> Iterator[None]:
    """Give handles created inside small workspaces, unless the user has set the variable. torch's own handles outside
    are unaffected. Threads may enter concurrently."""
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
