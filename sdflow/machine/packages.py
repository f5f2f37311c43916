"""Installed packages and their versions, from metadata; nothing is imported."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata

import sdflow
from sdflow.errors import UsageError
from sdflow.targets import ONNXRUNTIME_FLAVOURS

EXTRAS = {
    "build": (
        "accelerate", "diffusers", "huggingface_hub", "olive-ai", "onnx-ir", "onnxscript", "peft", "pillow", "safetensors",
        "sympy", "torch", "transformers",
    ),
    "gguf": ("gguf",),
    "serve": ("fastapi", "httpx", "prometheus-client", "python-multipart", "uvicorn"),
    "traces": ("opentelemetry-exporter-otlp-proto-http",),
    "remote": ("aiohttp",),
    "sign": ("model-signing", "pyopenssl"),
    "s3": ("aiobotocore", "s3fs"),
    "gs": ("gcsfs",),
    "az": ("adlfs",),
    "oci": ("oras",),
    "ray": ("protobuf", "ray"),
    "samples": ("sdflow-samples",),
    "bench": ("nvidia-ml-py", "torchao"),
    "export-text": ("onnxruntime-extensions",),
    "samplers": ("scipy", "torchsde"),
    "webgpu": ("onnxruntime-ep-webgpu",),
}  # fmt: skip
"""Extra of sdflow -> distributions that it installs."""
DRAWS = ("torch", "diffusers", "transformers", "pillow")  # needed to run pipelines, besides ONNX Runtime
SERVES = EXTRAS["serve"]
REFERENCE = (*DRAWS, "accelerate", "safetensors")  # needed for the PyTorch model that artifacts are verified against
_DISTRIBUTIONS = {
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "model_signing": "model-signing",
    "olive": "olive-ai",
    "onnx_ir": "onnx-ir",
    "onnxruntime_extensions": "onnxruntime-extensions",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "python_multipart": "python-multipart",
}
"""Module -> distribution, where the names differ."""
_AROUND = ("diffusers", "numpy", "onnx", "torch", "transformers")


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions(*names: str) -> dict[str, str]:
    """Return distribution -> version of those that are installed."""
    found = {name: installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


@cache
def found_version(name: str) -> str | None:
    """Return what `distribution_version` returns, or None if the distribution is not installed."""
    for flavour in ONNXRUNTIME_FLAVOURS if name == "onnxruntime" else (name,):
        if (version := installed_version(flavour)) is not None:
            return version
    return None


def distribution_version(name: str) -> str:
    """Return the version of a required distribution; "onnxruntime" stands for any of its flavours.

    Raises UsageError if it is not installed.
    """
    if (version := found_version(name)) is not None:
        return version
    extra = " (the extras of sdflow: cpu, cuda, migraphx, windowsml, directml)" if name == "onnxruntime" else ""
    raise UsageError(f"the package {name} is not installed", remedy=f"{how_to_install(name)}{extra}")


def missing(*names: str) -> tuple[str, ...]:
    """Return the distributions that are not installed, without duplicates."""
    return tuple(name for name in dict.fromkeys(names) if found_version(name) is None)


def how_to_install(*names: str) -> str:
    """Return the command that installs these distributions."""
    if "onnxruntime" in names and set(names) & set(EXTRAS["build"]):  # recommend an extra that has both
        others = [name for name in names if name not in EXTRAS["build"] and name != "onnxruntime"]
        command = how_to_install("torch", *others).replace("[build", "[cpu")
        return f"{command}, or cuda, directml or migraphx in place of cpu"
    extras = [extra for extra, distributions in EXTRAS.items() if set(names) & set(distributions)]
    others = [name for name in names if not any(name in EXTRAS[extra] for extra in extras)]
    return " ".join(["pip install", *([f"'sdflow[{','.join(extras)}]'"] if extras else []), *others])


def require_packages(what: str, *names: str) -> None:
    """Raise UsageError if a distribution is missing. what: the feature that needs it, such as "`sdflow generate`"."""
    if absent := missing(*names):
        raise lacks(what, absent)


def lacks(what: str, absent: Sequence[str], remedy: str | None = None) -> UsageError:
    """Return the error for a feature whose distributions are not installed."""
    are = "are" if len(absent) > 1 else "is"
    return UsageError(
        f"{what} needs {', '.join(absent)}, which {are} not installed", remedy=remedy or how_to_install(*absent)
    )


def of_missing_module(error: ImportError) -> UsageError | None:
    """Return the error for an import that failed because an extra is not installed; None for any other failure."""
    module = (error.name or "").partition(".")[0]
    name = _DISTRIBUTIONS.get(module, module)
    if not any(name in distributions for distributions in EXTRAS.values()) or found_version(name) is not None:
        return None
    return lacks("this", [name])


def onnxruntime_packages() -> dict[str, str]:
    """Return name -> version of the installed ONNX Runtime distributions. Several overwrite each other's files."""
    return {name: version for name, version in _named_onnxruntime() if not _PLUGINS.match(name)}


def plugin_packages() -> dict[str, str]:
    """Return name -> version of the installed plugin providers, which do not overwrite ONNX Runtime's files."""
    return {name: version for name, version in _named_onnxruntime() if _PLUGINS.match(name)}


_PLUGINS = re.compile(r"onnxruntime-(ep-|qnn$)")


def _named_onnxruntime() -> tuple[tuple[str, str], ...]:
    return _named_onnxruntime_in(tuple(sys.path))


@cache
def _named_onnxruntime_in(folders: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Cached, because it reads the metadata of every installed distribution."""
    found = []
    for distribution in metadata.distributions(path=list(folders)):
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if (name == "onnxruntime" or name.startswith("onnxruntime-")) and "extensions" not in name:
            found.append((name, distribution.version))
    return tuple(found)


def versions() -> dict[str, str]:
    """Return the versions of Python, sdflow, the ONNX Runtime packages, and related libraries."""
    own = {"python": platform.python_version(), "sdflow": sdflow.__version__}
    return {**own, **onnxruntime_packages(), **plugin_packages(), **installed_versions(*_AROUND)}
