"""Execution providers that come as a library of their own, which ONNX Runtime is told of: plugins.

`sdflow.targets.Plugin` names the package. ONNX Runtime holds a library until the process ends, so each is registered once.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from importlib import import_module
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.machine.onnx_runtime import onnxruntime_errors
from sdflow.machine.packages import how_to_install, installed_version
from sdflow.targets import Plugin, Target

SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""The WebGPU provider takes an adapter that computes on the processor only where this is set to 1."""

_NO_ADAPTER = re.compile(r"Failed to get a WebGPU adapter: (?P<cause>[^\n]*)")

_registered: set[str] = set()
_registering = threading.Lock()


def require_plugin(target: Target, plugin: Plugin) -> None:
    """Raises TargetUnavailableError when the package of the plugin is not installed. Nothing is imported."""
    if installed_version(plugin.distribution) is None:
        raise TargetUnavailableError(
            f"the package {plugin.distribution} is not installed",
            where=target.name,
            remedy=f"{how_to_install(plugin.distribution)} (beside {target.package}); it needs {plugin.system}",
        )


def plugin_devices(ort: Any, target: Target, plugin: Plugin) -> list[Any]:
    """The devices that the target's provider runs on, as ONNX Runtime lists them, the best first.

    Raises TargetUnavailableError when the package is missing, when its library cannot be loaded, and without a device.
    """
    require_plugin(target, plugin)
    if not hasattr(ort, "register_execution_provider_library"):
        raise TargetUnavailableError(
            f"ONNX Runtime {ort.__version__} takes no plugins",
            where=target.name,
            remedy=f"pip install -U {target.package}",
        )
    with _registering:
        if plugin.distribution not in _registered:
            _register(ort, target, plugin)
            _registered.add(plugin.distribution)
    names = {name for name, _, _ in target.providers}
    found = [device for device in ort.get_ep_devices() if device.ep_name in names]
    if not found:
        what = (
            lacks_of_system() or f"it finds no GPU (one that the processor emulates is taken with {SOFTWARE}=1 alone)"
        )
        raise TargetUnavailableError(what, where=target.name, remedy=f"It needs {plugin.system}.")
    return sorted(found, key=lambda device: device.device.type != ort.OrtHardwareDeviceType.GPU)


def plugin_failure(error: Exception, target: Target) -> TargetUnavailableError | None:
    """What to tell of a session that could not be made because the provider has no device; None for any other failure."""
    found = _NO_ADAPTER.search(str(error))
    if found is None or target.plugin is None:
        return None
    lacking = lacks_of_system()
    return TargetUnavailableError(
        f"no WebGPU adapter: {found['cause'].strip()}" + (f"; {lacking}" if lacking else ""),
        where=target.name,
        remedy=f"It needs {target.plugin.system}.",
    )


def _register(ort: Any, target: Target, plugin: Plugin) -> None:
    library = import_module(plugin.module).get_library_path()
    try:
        ort.register_execution_provider_library(plugin.distribution, library)
    except onnxruntime_errors(ort) as error:
        raise TargetUnavailableError(
            f"{plugin.distribution} {installed_version(plugin.distribution)} cannot be loaded by ONNX Runtime "
            f"{ort.__version__}: {error}",
            where=target.name,
            remedy=how_to_install(plugin.distribution),
        ) from error


def lacks_of_system() -> str | None:
    """Which library of the system is missing, in words; None where none is."""
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return "the Vulkan loader libvulkan.so.1 is not installed"
    return None
