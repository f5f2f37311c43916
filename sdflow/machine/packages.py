"""The installed packages and their versions, read from their metadata: no package is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
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
    "ray": ("ray",),
    "samples": ("sdflow-samples",),
    "bench": ("nvidia-ml-py", "torchao"),
    "export-text": ("onnxruntime-extensions",),
    "samplers": ("scipy", "torchsde"),
    "webgpu": ("onnxruntime-ep-webgpu",),
}  # fmt: skip
"""Extra of sdflow -> the distributions that it installs."""
DRAWS = ("torch", "diffusers", "transformers", "pillow")
"""What a pipeline draws with, beside ONNX Runtime."""
SERVES = EXTRAS["serve"]
"""What the server is made of."""
REFERENCE = (*DRAWS, "accelerate", "safetensors")
"""What makes the PyTorch model that artifacts are held to."""
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
"""Module -> its distribution, where they are named differently."""
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
def found_version(name: str) -> str | None:
    """As `distribution_version`; None when it is not installed."""
    for flavour in ONNXRUNTIME_FLAVOURS if name == "onnxruntime" else (name,):
        if (version := installed_version(flavour)) is not None:
            return version
    return None


def distribution_version(name: str) -> str:
    """The version of a distribution that must be there; "onnxruntime" is found under the name of any of its flavours.

    Raises UsageError when it is not installed.
    """
    if (version := found_version(name)) is not None:
        return version
    extra = " (the extras of sdflow: cpu, cuda, migraphx, windowsml, directml)" if name == "onnxruntime" else ""
    raise UsageError(f"the package {name} is not installed", remedy=f"{how_to_install(name)}{extra}")


def missing(*names: str) -> tuple[str, ...]:
    """Those of these distributions that are not installed, each once."""
    return tuple(name for name in dict.fromkeys(names) if found_version(name) is None)


def how_to_install(*names: str) -> str:
    """The command that installs these distributions."""
    if "onnxruntime" in names and set(names) & set(EXTRAS["build"]):  # one that brings both
        others = [name for name in names if name not in EXTRAS["build"] and name != "onnxruntime"]
        command = how_to_install("torch", *others).replace("[build", "[cpu")
        return f"{command}, or cuda, directml or migraphx in place of cpu"
    extras = [extra for extra, distributions in EXTRAS.items() if set(names) & set(distributions)]
    others = [name for name in names if not any(name in EXTRAS[extra] for extra in extras)]
    return " ".join(["pip install", *([f"'sdflow[{','.join(extras)}]'"] if extras else []), *others])


def require_packages(what: str, *names: str) -> None:
    """Raises UsageError when one of the distributions that something needs is not installed. what: "`sdflow generate`"."""
    if absent := missing(*names):
        raise lacks(what, absent)


def lacks(what: str, absent: Sequence[str], remedy: str | None = None) -> UsageError:
    """What to tell of a thing that cannot be done without distributions that are not installed."""
    are = "are" if len(absent) > 1 else "is"
    return UsageError(
        f"{what} needs {', '.join(absent)}, which {are} not installed", remedy=remedy or how_to_install(*absent)
    )


def of_missing_module(error: ImportError) -> UsageError | None:
    """What to tell of an import that failed because an extra of sdflow is not installed; None for any other."""
    module = (error.name or "").partition(".")[0]
    name = _DISTRIBUTIONS.get(module, module)
    if not any(name in distributions for distributions in EXTRAS.values()) or found_version(name) is not None:
        return None
    return lacks("this", [name])


def onnxruntime_packages() -> dict[str, str]:
    """The installed ONNX Runtime distributions, name -> version. More than one overwrite each other's files."""
    return {name: version for name, version in _named_onnxruntime() if not _PLUGINS.match(name)}


def plugin_packages() -> dict[str, str]:
    """The installed distributions of providers that lie beside ONNX Runtime, and overwrite nothing."""
    return {name: version for name, version in _named_onnxruntime() if _PLUGINS.match(name)}


_PLUGINS = re.compile(r"onnxruntime-(ep-|qnn$)")


def _named_onnxruntime() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if (name == "onnxruntime" or name.startswith("onnxruntime-")) and "extensions" not in name:
            yield name, distribution.version


def versions() -> dict[str, str]:
    """Python, sdflow, the installed ONNX Runtime by the name of its package, and the libraries around it."""
    own = {"python": platform.python_version(), "sdflow": sdflow.__version__}
    return {**own, **onnxruntime_packages(), **plugin_packages(), **installed_versions(*_AROUND)}
