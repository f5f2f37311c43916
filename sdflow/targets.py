"""The targets: which ONNX Runtime execution provider runs each, from which package, and with which session options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """A target that workflows can name.

    providers: (execution provider, first ORT version or None, last ORT version or None), the best first.
    session: session settings that the provider needs, as data for `sdflow.runtime`.
    """

    name: str
    title: str
    providers: tuple[tuple[str, str | None, str | None], ...]
    package: str
    session: Mapping[str, Any] = field(default_factory=dict)


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "CPU", (("CPUExecutionProvider", None, None),), "onnxruntime"),
        Target("cuda", "NVIDIA CUDA", (("CUDAExecutionProvider", None, None),), "onnxruntime-gpu"),
        Target("tensorrt", "NVIDIA TensorRT", (("TensorrtExecutionProvider", None, None),), "onnxruntime-gpu"),
        Target(
            "rocm",
            "AMD ROCm",
            (("MIGraphXExecutionProvider", "1.23", None), ("ROCMExecutionProvider", None, "1.22")),
            "onnxruntime-migraphx",
        ),
        Target("directml", "Windows DirectML", (("DmlExecutionProvider", None, None),), "onnxruntime-directml"),
    )
}
