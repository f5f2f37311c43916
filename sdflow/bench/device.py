"""The device that engines run on: synchronization, memory, energy."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import psutil

SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Memory:
    """Bytes in use; None if the driver does not report them or there is no such device.

    host: resident memory of this process. device: device memory of all processes. process: device memory of this
    process.
    """

    host: int | None = None
    device: int | None = None
    process: int | None = None

    def peak(self, other: Memory) -> Memory:
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return Memory(
            **{name: max((value for value in pair if value is not None), default=None) for name, pair in pairs.items()}
        )


class Device:
    """The device that a benchmark runs on.

    kind: "cuda" or "cpu". index: of torch.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def wait(self) -> None:
        """Wait until all queued work is done."""
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Return PyTorch's cached memory to the driver."""
        import torch

        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> Memory:
        host = psutil.Process().memory_info().rss
        if self.kind != "cuda":
            return Memory(host)
        if self._nvml is None:
            import torch

            free, total = torch.cuda.mem_get_info()
            return Memory(host, total - free)
        nvml, handle = self._nvml
        return Memory(host, int(nvml.nvmlDeviceGetMemoryInfo(handle).used), self._of_process(nvml, handle))

    @contextmanager
    def peak_memory(self) -> Iterator[list[Memory]]:
        """Yield a list whose only element is, after the block, the highest memory use within it.

        Samples every 10 ms, on the device only with NVML. Without NVML the device is queried only at the end, since a
        CUDA call from another thread would break the capture of a graph; allocators keep their peak memory.
        """
        found = [self.memory()]
        done = threading.Event()
        sampled = Device("cpu") if self.kind == "cuda" and self._nvml is None else self

        def sample() -> None:
            while not done.wait(SAMPLE_SECONDS):
                found[0] = found[0].peak(sampled.memory())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()
            found[0] = found[0].peak(self.memory())

    def free(self) -> int:
        """Free bytes where the weights go."""
        if self.kind == "cuda":
            import torch

            return int(torch.cuda.mem_get_info()[0])
        return int(psutil.virtual_memory().available)

    def energy(self) -> float | None:
        """Joules used by the device since its driver was loaded; None if unknown."""
        if self._nvml is None:
            return None
        nvml, handle = self._nvml
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError_NotSupported:
            return None

    @cached_property
    def _nvml(self) -> tuple[Any, Any] | None:
        """NVML and the device's handle, if the package nvidia-ml-py is installed."""
        if self.kind != "cuda":
            return None
        try:
            import pynvml
        except ImportError:
            return None
        import torch

        try:
            pynvml.nvmlInit()
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        except pynvml.NVMLError:
            return None

    @staticmethod
    def _of_process(nvml: Any, handle: Any) -> int | None:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)
