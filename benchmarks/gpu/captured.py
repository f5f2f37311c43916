"""Shared by the kernel benchmarks: a session that replays one CUDA graph, and the time of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto

TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
}
RESULTS = {
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(float)": torch.float32,
    "tensor(int8)": torch.int8,
}


class Captured:
    """A session of a graph with our operators, on these inputs, and its results."""

    def __init__(self, graph: onnx.ModelProto, library: Path, given: Mapping[str, torch.Tensor]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(str(library))
        options.log_severity_level = 3
        providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
        self.session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=providers)
        outputs = {
            item.name: torch.empty(item.shape, dtype=RESULTS[item.type], device="cuda")
            for item in self.session.get_outputs()
        }
        self.given, self.results = dict(given), list(outputs.values())
        self.binding = self.session.io_binding()
        for bind, tensors in ((self.binding.bind_input, given), (self.binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                bind(name, "cuda", 0, TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for _ in range(4):
            self()
        torch.cuda.synchronize()

    def __call__(self) -> list[torch.Tensor]:
        self.session.run_with_iobinding(self.binding)
        return self.results


def microseconds(run: Callable[[], Any], *, runs: int, rest: float) -> float:
    """Of one run of several in a row, after a rest."""
    time.sleep(rest)
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(runs):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / runs * 1e6
