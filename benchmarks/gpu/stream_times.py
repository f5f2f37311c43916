"""Where the time of streamed weights goes, for weights_in_turns.py: how fast each memory is copied, also while products are
computed, how long weights take to come back, and the least free memory of the device."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 27


def copied_per_second() -> float:
    """Bytes, from page-locked memory of the host to the device."""
    import torch

    host, device = (
        torch.empty(1 << 30, dtype=torch.uint8).pin_memory(),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    )
    return max(_copied(host, device, torch.cuda.current_stream()) for _ in range(4))


def _copied(host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream) -> float:
    """Bytes a second of copies of a whole memory, in chunks to the same place, on a stream."""
    import torch

    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begun.record()
        for chunk in host.split(min(CHUNK, len(device))):
            device[: len(chunk)].copy_(chunk, non_blocking=True)
        ended.record()
    ended.synchronize()
    return host.nbytes / (begun.elapsed_time(ended) / 1000)


def _copied_beside_products(host: torch.Tensor, device: torch.Tensor) -> tuple[float, float]:
    """Bytes a second of copies during products, and the products' time relative to that without copies."""
    import torch

    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c, stream = torch.empty_like(a), torch.cuda.Stream()
    count = 60 + int(host.nbytes / 55e9 / 0.2e-3)  # for longer than the copies take

    def products() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(count):
            torch.mm(a, b, out=c)
        ended.record()
        if not copying.is_set():
            ended.synchronize()
        timed.append((begun, ended))
        return 0.0

    timed: list[Any] = []
    copying = threading.Event()
    products()
    products()
    copying.set()
    products()
    rate = _copied(host, device, stream)
    torch.cuda.synchronize()
    alone, beside = (begun.elapsed_time(ended) for begun, ended in timed[1:])
    return rate, beside / alone


def memories(pipeline: Any) -> dict[str, Any]:
    """Submodel -> GB/s of its streamed weights' own memory, alone and during products; seconds in which its other weights
    leave and come back. Empties the device of other weights."""
    import torch

    found: dict[str, Any] = {}
    for name, submodel in pipeline.submodels.items():
        weights, each = submodel.weights, dict[str, Any]()
        if weights is None or weights.resident is None:
            continue
        with pipeline.place.current():
            submodel.residency.make_room(1 << 60)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            with weights.resident.using():
                each["host_s"] = time.perf_counter() - begun
            torch.cuda.synchronize()
            each["back_s"] = time.perf_counter() - begun
            begun = time.perf_counter()
            submodel.residency.make_room(1 << 60)
            each["leave_s"] = time.perf_counter() - begun
            each["bytes"] = weights.resident.weights.size
            streams = weights.streams()
            if streams is not None and streams.memory is not None:
                buffer = weights.plan.buffers.on(submodel.place.device)[0]
                each["copied_per_second"] = _copied(streams.memory, buffer, torch.cuda.current_stream())
                each["beside_products"] = _copied_beside_products(streams.memory, buffer)
        found[name] = each
    return found


def streamed(pipeline: Any) -> dict[str, Any]:
    """Submodel -> what its plan says, and the bytes of values that ONNX Runtime let no operator pass in place."""
    from sdflow.runtime.kernels.library import operator_library

    plans = {name: each.weights.plan for name, each in pipeline.submodels.items() if each.weights is not None}
    found: dict[str, Any] = {
        name: {
            "resident": plan.resident,
            "streamed": plan.size,
            "per_run": plan.per_run,
            "weights": len(plan.streamed),
            "buffer": plan.buffers.size,
        }
        for name, plan in plans.items()
        if plan is not None
    }
    if found:
        moved = ctypes.CDLL(str(operator_library())).sdflow_moved_bytes
        moved.restype = ctypes.c_int64
        found["moved_bytes"] = moved()
    return found


def steady(found: dict[str, Any]) -> float:
    """Milliseconds of a step: the median without the first one, in which weights come back."""
    return statistics.median(found["step_ms"][1:])


def report(everything: dict[str, Any], fit: dict[str, Any]) -> None:
    """Print each submodel's copies alone, the steps with all weights and with a limit, and what of the copies was not
    hidden; note the steps' ratio."""
    print(f"copies from page-locked memory of 1 GB: {fit['copied_per_second'] / 1e9:.1f} GB/s; {numa()}")
    for name, each in fit["memories"].items():
        line = (
            f"{name}: {each['bytes'] / 1e9:.2f} GB stay; all of them come back in {each['back_s'] * 1000:.0f} ms "
            f"({each['host_s'] * 1000:.0f} on the host, {each['bytes'] / each['back_s'] / 1e9:.1f} GB/s) and leave in "
            f"{each['leave_s'] * 1000:.0f} ms"
        )
        if name in fit["streams"] and "copied_per_second" in each:
            plan, rate = fit["streams"][name], each["copied_per_second"]
            line += (
                f"; {plan['streamed'] / 1e9:.2f} GB are streamed, {plan['per_run'] / 1e9:.2f} of them in every run, whose "
                f"copies alone take {plan['per_run'] / rate * 1000:.1f} ms ({rate / 1e9:.1f} GB/s, "
                f"{each['beside_products'][0] / 1e9:.1f} during products, which then take {each['beside_products'][1]:.3f})"
            )
        print(line)
    if "moved_bytes" in fit["streams"]:
        print(
            f"values moved because they were not passed in place: {fit['streams']['moved_bytes']} bytes (expected: 0)"
        )
    computed, streaming = steady(everything), steady(fit)
    for way, each in (("all weights", everything), ("limited", fit)):
        listed = ", ".join(f"{step:.1f}" for step in each["step_ms"])
        print(f"{way}: a step {steady(each):.1f} ms (steps: {listed}), most memory {each['bytes'] / 1e9:.2f} GB")
    print(
        f"time: a step computes {computed:.1f} ms; with streaming {streaming:.1f} ms ({streaming / computed:.3f}), so "
        f"{streaming - computed:.1f} ms are not hidden; the first step takes {fit['step_ms'][0] - streaming:.1f} ms more "
        f"(weights that come back or are read once per image); text {everything['parts']['text_s'] * 1000:.0f} and "
        f"{fit['parts']['text_s'] * 1000:.0f} ms, decoder {everything['parts']['decode_s'] * 1000:.0f} and "
        f"{fit['parts']['decode_s'] * 1000:.0f} ms"
    )
    fit["ratio"]["step"] = streaming / computed


def numa() -> str:
    """The host's memory nodes and the device's."""
    import torch

    nodes = [each.name for each in Path("/sys/devices/system/node").glob("node[0-9]*")]
    made = torch.cuda.get_device_properties(0)
    try:
        place = f"{made.pci_domain_id:04x}:{made.pci_bus_id:02x}:{made.pci_device_id:02x}.0"
        near = Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text().strip()
    except (OSError, AttributeError):
        near = "unknown"
    return f"{len(nodes)} memory nodes, the device at node {near}"


class Watch:
    """Looks for the least free memory of the device every 5 ms, through NVML, which no capture notices."""

    def __init__(self) -> None:
        self.least = -1
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        import torch

        class Memory(ctypes.Structure):
            _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))

        handle, memory = ctypes.c_void_p(), Memory()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return
        while not self._end.wait(0.005):
            if not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                self.least = memory.free if self.least < 0 else min(self.least, memory.free)
