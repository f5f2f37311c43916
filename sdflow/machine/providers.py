"""Execution providers that the installed ONNX Runtime was built with.

A built-in provider may still lack its libraries, driver or device: see `sdflow.runtime.sessions.availability`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.packages import installed_versions
from sdflow.machine.plugins import plugins_of
from sdflow.targets import ONNXRUNTIME_FLAVOURS, Target

_PLATFORMS = {"win32": "Windows", "linux": "Linux", "darwin": "macOS"}


def require_platform(target: Target) -> None:
    """Raise TargetUnavailableError if the target runs on another operating system only."""
    if target.platform is not None and sys.platform != target.platform:
        raise TargetUnavailableError(
            f"it runs on {_PLATFORMS[target.platform]} only",
            where=target.name,
            remedy="Building for it works everywhere; take the pipeline folder there to run it (with --copy).",
        )


def require_package(target: Target) -> None:
    """Raise TargetUnavailableError if the system or the installed packages rule the target out. Takes milliseconds.

    The plain `onnxruntime` package has the CPU provider only.
    """
    require_platform(target)
    if target.name == "cpu":
        return
    if target.plugins:
        if not any(find_spec(module) for module in target.plugins.values()):
            raise TargetUnavailableError(
                f"the package {target.package} is not installed", where=target.name, remedy=_remedy(target)
            )
        return
    if list(installed_versions(*ONNXRUNTIME_FLAVOURS)) == ["onnxruntime"]:
        wanted = " or ".join(provider for provider, _, _ in target.providers)
        raise TargetUnavailableError(
            f"the installed package onnxruntime has the CPU's provider only, not {wanted}",
            where=target.name,
            remedy=_remedy(target),
        )


def onnxruntime_for(target: Target) -> tuple[Any, str]:
    """Return ONNX Runtime, and the target's best provider that is built in or whose plugin has a device.

    Raises TargetUnavailableError if ONNX Runtime or the provider is missing.
    """
    require_platform(target)
    ort = import_onnxruntime(target)
    plugins = plugins_of(ort, target)
    available = [*(() if target.plugins else ort.get_available_providers()), *plugins.devices]
    return ort, choose_provider(target, ort.__version__, available, plugins.missing)


def choose_provider(
    target: Target, version: str, available: Iterable[str], missing: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the target's best provider among those available in this ONNX Runtime version.

    missing: provider -> why its plugin cannot be used.
    Raises TargetUnavailableError, which names the missing package or version.
    """
    require_platform(target)
    present, reasons = set(available), []
    for provider, first, last in target.providers:
        if (first and _release(version) < _release(first)) or (last and _release(version) > _release(last)):
            bound = f"{first} or later" if first else f"{last} or earlier"
            reasons.append(f"{provider} needs ONNX Runtime {bound}, but this is {version}")
        elif provider in missing:
            reasons.append(f"{provider}: {missing[provider]}")
        elif provider not in present:
            reasons.append(f"the installed ONNX Runtime {version} was built without {provider}")
        else:
            return provider
    raise TargetUnavailableError(
        "; ".join(dict.fromkeys(reasons)),
        where=target.name,
        remedy=_remedy(target),
    )


def _remedy(target: Target) -> str:
    if target.plugins:
        command = f"pip install 'sdflow[{target.name.replace('_', '-')}]'"
        return f"{command}; it needs {target.requires or 'what docs/targets.md says'}"
    return f"pip install {target.package}, alone: ONNX Runtime's packages overwrite each other"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
