"""Execution providers that ONNX Runtime loads as plugins: their libraries, and the devices they offer on this machine.

A library that offers a device is registered once per process. Its path comes from its package (`get_library_path`) or,
for Windows ML, from the catalogue that Windows keeps for the machine's hardware (package windowsml).
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.machine.device import nvidia_gpu, processor
from sdflow.machine.onnx_runtime import onnxruntime_errors
from sdflow.machine.webgpu import missing_device
from sdflow.targets import WEBGPU_PROVIDER, Target

CATALOGUE = "windowsml"  # the module in `Target.plugins` that stands for Windows ML's catalogue

INSTALL_COMMAND = "python -m sdflow.machine.windows_ml"

_KINDS = ("GPU", "NPU", "CPU")
"""Device kinds, best first: a denoiser is too large for most NPUs."""

_NVIDIA = 0x10DE
_VENDORS = {0x1002: "AMD", 0x106B: "Apple", _NVIDIA: "NVIDIA", 0x5143: "Qualcomm", 0x8086: "Intel"}
"""PCI vendors by number: ONNX Runtime leaves their names out on Linux."""

_VOLATILE = ("library_path", "LUID", "DxgiAdapterNumber", "DxgiHighPerformanceIndex", "pci_bus_id", "card_idx")
"""Metadata that depends on the boot or the folder, not on the device."""


@dataclass
class _Registered:
    """State of registration in this process. catalogue: kept alive, as the providers it found must not outlive it."""

    errors: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    catalogue: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_here = _Registered()


@dataclass(frozen=True)
class Plugins:
    """The plugin providers of this machine.

    devices: provider -> `OrtEpDevice`s that it offers, best first. missing: provider -> why it offers none.
    """

    devices: Mapping[str, list[Any]]
    missing: Mapping[str, str]


def plugins_of(ort: Any, target: Target) -> Plugins:
    """Register the target's plugins if needed and return them.

    Raises TargetUnavailableError if this ONNX Runtime does not support plugins.
    """
    if not target.plugins:
        return Plugins({}, {})
    if not hasattr(ort, "register_execution_provider_library"):
        raise TargetUnavailableError(
            f"ONNX Runtime {ort.__version__} takes no providers as plugins",
            where=target.name,
            remedy="pip install --upgrade onnxruntime",
        )
    with _here.lock:
        found = list(_libraries(target)) if target.plugins.keys() - _here.done else []
        for provider, library in found:
            if provider in _here.done:
                continue
            try:
                # Use the target's name of the provider: NVIDIA's library names its provider after the registration.
                ort.register_execution_provider_library(provider, library)
            except onnxruntime_errors(ort) as error:
                _here.errors[provider] = f"its library cannot be loaded: {error}"
            else:
                _here.done.add(provider)
                _here.errors.pop(provider, None)
        offered = list(ort.get_ep_devices())
        devices: dict[str, list[Any]] = {}
        for provider in target.plugins:
            if mine := [each for each in offered if each.ep_name.lower() == provider.lower()]:
                devices[provider] = sorted(mine, key=_rank)
        if not devices:
            _unregister(ort, target.plugins.keys() & _here.done)
    missing = {name: _here.errors.get(name) or _no_device(name) for name in target.plugins if name not in devices}
    return Plugins(devices, missing)


def _unregister(ort: Any, providers: Iterable[str]) -> None:
    """Unregister libraries without devices, and so without sessions: a library looks for devices only on registration,
    so the next call can find new ones."""
    for provider in providers:
        with suppress(*onnxruntime_errors(ort)):  # still in use: it stays registered
            ort.unregister_execution_provider_library(provider)
            _here.done.discard(provider)


def is_emulated(ort: Any, target: Target) -> bool:
    """Return whether the target's sessions run on an emulated GPU: runs take seconds instead of milliseconds."""
    devices = plugins_of(ort, target).devices.get(WEBGPU_PROVIDER, [])
    return bool(devices) and _kind(devices[0]) == "CPU"


def accelerator(ort: Any, target: Target, provider: str | None) -> str | None:
    """Return the name of the hardware that a target's sessions run on, as far as it is known; None for other targets
    than plugins and DirectML."""
    if target.name == "directml":
        return ", ".join(display_drivers()) or None
    found = plugins_of(ort, target).devices.get(provider or "", [])
    if not found:
        return None
    if provider == WEBGPU_PROVIDER and _kind(found[0]) == "CPU":
        return f"GPU emulated by {processor()}"
    return device_title(found[0])


def device_title(device: Any) -> str:
    """Return a device's name by Windows or NVIDIA's driver, or else its PCI vendor and device."""
    told = {**device.device.metadata, **device.ep_metadata}
    number = device.device.vendor_id
    if described := str(told.get("Description") or "").strip():
        return described
    if number == _NVIDIA and _kind(device) == "GPU" and (named := nvidia_gpu()):
        return named
    vendor = str(device.device.vendor or "").strip() or _VENDORS.get(number) or f"vendor {number:#06x}"
    return f"{vendor} {_kind(device)} {device.device.device_id:#06x}"


def device_facts(device: Any) -> dict[str, Any]:
    """Return what identifies a device and its provider's version, without values that change per boot."""
    metadata = {**device.device.metadata, **device.ep_metadata}
    return {
        "vendor": device.device.vendor,
        "vendor_id": device.device.vendor_id,
        "device_id": device.device.device_id,
        "kind": _kind(device),
        **{name: metadata[name] for name in sorted(metadata) if name not in _VOLATILE},
    }


def _libraries(target: Target) -> Iterator[tuple[str, str]]:
    """Yield provider and library path of the installed ones, and note why the others are missing."""
    for module in dict.fromkeys(target.plugins.values()):
        mine = [provider for provider, other in target.plugins.items() if other == module]
        try:
            if module == CATALOGUE:
                yield from _in_catalogue(mine)
            else:
                path = importlib.import_module(module).get_library_path()
                yield from ((provider, path) for provider in mine)
        except ImportError as error:
            _note(mine, f"the package {target.package} is not installed ({error})")
        except OSError as error:
            _note(mine, f"the package {target.package} cannot be loaded: {error}")


def _in_catalogue(providers: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the catalogue's providers on this machine. Downloads none: `sdflow.machine.windows_ml` does that."""
    windowsml = importlib.import_module(CATALOGUE)
    if _here.catalogue is None:
        _here.catalogue = windowsml.EpCatalog()
    names = {name.lower(): name for name in providers}
    _note(providers, "Windows ML's catalogue does not offer it for this machine")
    for each in _here.catalogue.find_all_providers():
        provider = names.get(each.name.lower())
        if provider is None:
            continue
        if each.ready_state == windowsml.EpReadyState.NotPresent:
            _note([provider], f"Windows ML offers it, and it is not downloaded; {INSTALL_COMMAND} does that")
            continue
        try:
            each.ensure_ready()
            library = each.library_path
        except OSError as error:
            _note([provider], f"Windows ML cannot make it ready: {error}")
            continue
        yield provider, library


def _no_device(provider: str) -> str:
    return missing_device() if provider == WEBGPU_PROVIDER else "it finds no device on this machine"


def _note(providers: list[str], why: str) -> None:
    _here.errors |= dict.fromkeys(providers, why)


def _kind(device: Any) -> str:
    return str(device.device.type).rpartition(".")[2]


def _rank(device: Any) -> int:
    kind = _kind(device)
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def display_drivers() -> list[str]:
    """Return names and versions of display and NPU drivers from Windows' registry; [] on other systems."""
    if sys.platform != "win32":
        return []
    import winreg

    found = []
    for kind in ("{4d36e968-e325-11ce-bfc1-08002be10318}", "{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}"):
        for index in range(16):
            path = rf"SYSTEM\CurrentControlSet\Control\Class\{kind}\{index:04d}"
            try:
                with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
                    words = [winreg.QueryValueEx(key, name)[0] for name in ("DriverDesc", "DriverVersion")]
            except OSError:
                continue
            found.append(" ".join(map(str, words)))
    return sorted(found)
