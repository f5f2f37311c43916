"""Describes the device of a measurement: processor, memory, accelerator."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

from sdflow.machine.nvml import nvml
from sdflow.targets import Target

_BY_TORCH = ("cuda", "tensorrt", "rocm")
"""Targets whose device PyTorch reports; its ROCm builds report it as CUDA."""


def device(target: Target) -> dict[str, Any]:
    """Return processor, usable cores, memory in bytes, operating system, and the target's accelerator."""
    import psutil

    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "accelerator": cuda_device().get("accelerator") if target.name in _BY_TORCH else None,
    }


def cores() -> int | None:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def has_cuda() -> bool:
    """Return whether PyTorch sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def cuda_device() -> dict[str, Any]:
    """Return PyTorch's first CUDA device: name, memory in bytes, CUDA and cuDNN versions; {} if there is none."""
    if not has_cuda():
        return {}
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "accelerator": str(properties.name),
        "accelerator_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver from NVML, such as 580.159.04; None if there is none."""
    said = ctypes.create_string_buffer(96)
    known = nvml(lambda it: it.nvmlSystemGetDriverVersion(said, len(said)))
    return said.value.decode(errors="replace") if known else None


def nvidia_gpu() -> str | None:
    """Return the name of the first NVIDIA GPU from NVML, which needs no PyTorch; None if there is none."""
    handle, said = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    known = nvml(
        lambda it: it.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        lambda it: it.nvmlDeviceGetName(handle, said, len(said)),
    )
    return said.value.decode(errors="replace") if known else None


def amd_versions() -> dict[str, str | None]:
    """Return what programs compiled by MIGraphX depend on: GPU architecture, driver, ROCm; None where unknown."""
    return {
        "architecture": _amd_architecture(),
        "driver": _amd_driver(),
        "rocm": _text(Path("/opt/rocm/.info/version")),
    }


def _amd_architecture() -> str | None:
    """Return the architecture, such as gfx1100; None unless PyTorch was built for ROCm."""
    if not has_cuda():
        return None
    import torch

    name = getattr(torch.cuda.get_device_properties(0), "gcnArchName", None)
    return None if name is None else str(name)


def _amd_driver() -> str | None:
    """Return the version of AMD's driver package, or of the kernel, which has a driver built in."""
    return _text(Path("/sys/module/amdgpu/version")) or (platform.release() if sys.platform == "linux" else None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def processor() -> str:
    """Return the processor's name, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
