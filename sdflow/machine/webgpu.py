"""System requirements of the WebGPU provider, and the errors when they are missing."""

from __future__ import annotations

import ctypes
import re
import sys

from sdflow.errors import TargetUnavailableError
from sdflow.targets import WEBGPU_PROVIDER, Target

SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""Environment variable that makes the provider accept a software adapter if set to 1."""

_NO_ADAPTER = re.compile(r"Failed to get a WebGPU adapter: (?P<cause>[^\n]*)")


def adapter_failure(error: Exception, target: Target) -> TargetUnavailableError | None:
    """Return the error for a session that failed because there is no adapter; None for any other failure."""
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
    """Return why the provider offers no device."""
    return missing_library() or f"it finds no GPU (an emulated one is used only with {SOFTWARE}=1)"


def missing_library() -> str | None:
    """Return a sentence on the missing system library, or None if none is missing."""
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return "the Vulkan loader libvulkan.so.1 is not installed"
    return None
