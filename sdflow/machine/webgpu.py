"""What WebGPU's provider needs of the system, and how it says that there is none."""

from __future__ import annotations

import ctypes
import re
import sys

from sdflow.errors import TargetUnavailableError
from sdflow.targets import WEBGPU_PROVIDER, Target

SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""The provider takes an adapter that computes on the processor only where this is set to 1."""

_NO_ADAPTER = re.compile(r"Failed to get a WebGPU adapter: (?P<cause>[^\n]*)")


def adapter_failure(error: Exception, target: Target) -> TargetUnavailableError | None:
    """What to tell of a session that could not be made because there is no adapter; None for any other failure."""
    found = _NO_ADAPTER.search(str(error))
    if found is None or WEBGPU_PROVIDER not in target.plugins:
        return None
    lacking = missing_library()
    return TargetUnavailableError(
        f"no WebGPU adapter: {found['cause'].strip()}" + (f"; {lacking}" if lacking else ""),
        where=target.name,
        remedy=f"It needs {target.requires}.",
    )


def missing_device() -> str:
    """Why the provider offers no device here."""
    return missing_library() or f"it finds no GPU (an emulated one is used only with {SOFTWARE}=1)"


def missing_library() -> str | None:
    """Which library of the system is missing, in words; None where none is."""
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return "the Vulkan loader libvulkan.so.1 is not installed"
    return None
