"""What a measurement was made on: processor, memory, accelerator, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sdflow
from sdflow.runtime.availability import onnxruntime_packages
from sdflow.targets import Target

_DISTRIBUTIONS = ("diffusers", "numpy", "onnx", "torch", "transformers")


def device(target: Target) -> dict[str, Any]:
    """Processor, its cores that this process may use, memory in bytes, operating system, the target's accelerator."""
    import psutil

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "accelerator": _accelerator(target),
    }


def versions() -> dict[str, str]:
    """Python, sdflow, the installed ONNX Runtime by the name of its package, and the libraries around it."""
    found = {"python": platform.python_version(), "sdflow": sdflow.__version__, **onnxruntime_packages()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _accelerator(target: Target) -> str | None:
    if target.name not in ("cuda", "tensorrt", "rocm"):
        return None
    import torch  # ROCm builds answer under the same name

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
