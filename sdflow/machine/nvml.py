"""Calls of NVML, NVIDIA's library for its graphics cards, without PyTorch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def nvml(*calls: Callable[[Any], int]) -> bool:
    """Return whether NVML is there and every call of it succeeds. calls: take the library, return NVML's status."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        return library.nvmlInit_v2() == 0 and all(call(library) == 0 for call in calls)
    except (OSError, AttributeError):
        return False
