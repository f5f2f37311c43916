"""The installed packages and their versions, read from their metadata: no package is imported."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

import sdflow
from sdflow.errors import UsageError
from sdflow.targets import ONNXRUNTIME_FLAVOURS

_AROUND = ("diffusers", "numpy", "onnx", "torch", "transformers")


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions(*names: str) -> dict[str, str]:
    """Distribution -> version, of those that are installed."""
    found = {name: installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


@cache
def distribution_version(name: str) -> str:
    """The version of a distribution that must be there; "onnxruntime" is found under the name of any of its flavours.

    Raises UsageError when it is not installed.
    """
    for flavour in ONNXRUNTIME_FLAVOURS if name == "onnxruntime" else (name,):
        if (version := installed_version(flavour)) is not None:
            return version
    extra = " (the extras of sdflow: cpu, cuda, migraphx, directml)" if name == "onnxruntime" else ""
    raise UsageError(f"the package {name} is not installed", remedy=f"pip install {name}{extra}")


def onnxruntime_packages() -> dict[str, str]:
    """The installed ONNX Runtime distributions, name -> version. More than one overwrite each other's files."""
    found = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if (name == "onnxruntime" or name.startswith("onnxruntime-")) and "extensions" not in name:
            found[name] = distribution.version
    return found


def versions() -> dict[str, str]:
    """Python, sdflow, the installed ONNX Runtime by the name of its package, and the libraries around it."""
    own = {"python": platform.python_version(), "sdflow": sdflow.__version__}
    return {**own, **onnxruntime_packages(), **installed_versions(*_AROUND)}
