"""Memory of this machine's graphics cards, from NVML, `nvidia-smi` or PyTorch, whichever is available."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from sdflow.machine.nvml import nvml
from sdflow.machine.packages import found_version

_SECONDS = 5


@dataclass(frozen=True)
class Card:
    """A graphics card. memory: bytes."""

    name: str
    memory: int


def card() -> Card | None:
    """Return the first card found, or None. Only PyTorch honors CUDA_VISIBLE_DEVICES."""
    return _of_nvml() or _of_command() or _of_torch()


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


MOST_PROCESSES = 256


def process_bytes(device: str) -> int | None:
    """Return the bytes of a CUDA device that this process uses, according to the driver; None if unknown, as in
    containers that hide the host's process ids. device: in torch's notation."""
    import torch

    handle, count, found = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
    known = nvml(
        lambda it: it.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode(), ctypes.byref(handle)
        ),
        lambda it: it.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found),
    )
    own = [int(each.used) for each in found[: count.value if known else 0] if each.pid == os.getpid()]
    return own[0] if own and own[0] != _UNKNOWN else None


_UNKNOWN = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE."""


def _of_nvml() -> Card | None:
    """https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html"""
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    known = nvml(
        lambda it: it.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        lambda it: it.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        lambda it: it.nvmlDeviceGetName(handle, name, len(name)),
    )
    return Card(name.value.decode(errors="replace"), int(memory.total)) if known else None


def _of_command() -> Card | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
        name, _, mebibytes = said.splitlines()[0].rpartition(",")
        return Card(name.strip(), int(mebibytes) << 20)
    return None


def _of_torch() -> Card | None:
    """Ask PyTorch, which knows AMD's cards too. Skips CPU-only builds: importing takes a second."""
    version = found_version("torch")
    if version is None or version.endswith("+cpu"):
        return None
    from sdflow.machine.device import cuda_device

    found = cuda_device()
    return Card(found["accelerator"], found["accelerator_bytes"]) if found else None
