"""Products of float8 in ONNX Runtime, at the sizes of a step: our kernels for Hopper beside cuBLASLt's.

    python benchmarks/float8_products.py [SECONDS]

As many products of one size as have more weights than the L2 cache holds, captured in a CUDA graph: with our kernels, and with
the library as it is compiled for other GPUs, where all are cuBLASLt's. Microseconds for one, with its memory nodes, and its
distance (relative L2) from float64's product of the same numbers. Where a gate follows, it and its rows are counted too. At the
end the sum of a step of SDXL's UNet.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

sys.path[:0] = [str(Path(__file__).parents[1])]

from sdflow.distance import relative_l2  # noqa: E402
from sdflow.machine.onnx_runtime import import_onnxruntime  # noqa: E402
from sdflow.onnx_model.float8 import DOMAIN  # noqa: E402
from sdflow.runtime.kernels import float8_proof as proof  # noqa: E402
from sdflow.runtime.kernels import library  # noqa: E402
from sdflow.runtime.kernels.replace import VERSION  # noqa: E402

SECONDS, ROUNDS = 60.0, 5
COLD, MOST_NODES, CHECKED = 80 << 20, 48, 100
SHAPES = (  # rows, N, K, whether a gate follows, how often in a step at batch 2 and 1024x1024
    (2048, 1280, 1280, False, 312), (2048, 3840, 1280, False, 60), (2048, 10240, 1280, True, 60),
    (2048, 1280, 5120, False, 60), (8192, 640, 640, False, 74), (8192, 1920, 640, False, 10),
    (8192, 5120, 640, True, 10), (8192, 640, 2560, False, 10),
)  # fmt: skip


class Products:
    """A session with `count` products of one size."""

    def __init__(self, made: Path, shape: tuple[int, int, int], gate: bool, ours: bool) -> None:
        rows, n, k = shape
        self.count = max(4, min(MOST_NODES, COLD // (n * k)))
        random = np.random.default_rng(0)
        self.rows, self.scales = proof.quantized(random.normal(size=(rows, k)).astype(np.float16))
        self.weight, self.weight_scales = proof.quantized(random.normal(size=(n, k)) / k**0.5)
        self.bias = random.normal(size=n).astype(np.float16)
        stored = [numpy_helper.from_array(self.weight_scales, "ws"), numpy_helper.from_array(self.bias, "bias")]
        nodes, results = [], []
        for i in range(self.count):
            stored.append(numpy_helper.from_array(np.roll(self.weight, i, 0), f"w{i}"))
            operands = ["x", "xs", f"w{i}", "ws"]
            if gate and ours:
                nodes += [self._node("Float8GatedProduct", [*operands, "bias"], [f"g{i}"])]
                nodes += [self._node("Float8Rows", [f"g{i}"], [f"y{i}", f"s{i}"])]
            elif gate:
                nodes += [self._node("Float8Product", operands, [f"p{i}", f"p{i}w"])]
                nodes += [self._node("Float8SplitGelu", [f"p{i}", "bias"], [f"y{i}", f"s{i}"])]
            else:
                nodes += [self._node("Float8Product", operands, [f"y{i}", f"y{i}w"])]
            element, width = (TensorProto.UINT8, n // 2) if gate else (TensorProto.FLOAT16, n)
            results.append(helper.make_tensor_value_info(f"y{i}", element, (rows, width)))
            if gate:
                results.append(helper.make_tensor_value_info(f"s{i}", TensorProto.FLOAT, (rows,)))
        given = [
            helper.make_tensor_value_info("x", TensorProto.UINT8, self.rows.shape),
            helper.make_tensor_value_info("xs", TensorProto.FLOAT, self.scales.shape),
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
        graph = helper.make_graph(nodes, "products", given, results, stored)
        self.gate, self.stream = gate, torch.cuda.Stream()
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(made))
        provider = {"enable_cuda_graph": "1", "user_compute_stream": str(self.stream.cuda_stream)}
        self.session = ort.InferenceSession(
            helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(),
            options,
            providers=[("CUDAExecutionProvider", provider)],
        )
        self.binding = self.session.io_binding()
        self.held = {"x": torch.from_numpy(self.rows).cuda(), "xs": torch.from_numpy(self.scales).cuda()}
        types = {TensorProto.UINT8: torch.uint8, TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16}
        for item in results:
            axes = [axis.dim_value for axis in item.type.tensor_type.shape.dim]
            self.held[item.name] = torch.empty(axes, dtype=types[item.type.tensor_type.elem_type], device="cuda")
        for name, tensor in self.held.items():
            bind = self.binding.bind_input if name in ("x", "xs") else self.binding.bind_output
            element = str(tensor.dtype).removeprefix("torch.")
            bind(name, "cuda", 0, np.dtype(element).type, tuple(tensor.shape), tensor.data_ptr())
        self.how = ort.RunOptions()
        self.how.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for _ in range(3):
            self.run()

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.how)

    def microseconds(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            begin.record()
            self.run()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.count * 1e3

    def distance(self) -> float:
        """Of some rows, of the last product."""
        last = self.count - 1
        feeds = {"rows": self.rows[:CHECKED], "scales": self.scales[:CHECKED], "bias": self.bias}
        feeds |= {"weight": np.roll(self.weight, last, 0), "weight_scales": self.weight_scales}
        found = self.held[f"y{last}"][:CHECKED].cpu().numpy()
        if not self.gate:
            return relative_l2(found, proof.product_expected(feeds))
        wanted = proof.quantized(proof.gated_expected(feeds))
        scales = self.held[f"s{last}"][:CHECKED].cpu().numpy()
        return relative_l2(proof.dequantized(found, scales), proof.dequantized(*wanted))

    @staticmethod
    def _node(operator: str, inputs: list[str], outputs: list[str]) -> Any:
        return helper.make_node(operator, inputs, outputs, outputs[0], domain=DOMAIN)


def main() -> None:
    limit, begun = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS, time.monotonic()
    torch.zeros(1, device="cuda")
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ours", "cublaslt"):
            place = Path(folder) / name
            place.mkdir()
            made[name] = library.compile_library(place, library.Nvrtc(), "cc", "90")
            library.HOPPER = "none"  # sm_90, as if there were no sm_90a
        print(torch.cuda.get_device_name(), flush=True)
        total = dict.fromkeys(made, 0.0)
        for rows, n, k, gate, count in SHAPES:
            if time.monotonic() - begun > limit:
                print("time is up: the sums lack what follows")
                break
            both = {name: Products(path, (rows, n, k), gate, name == "ours") for name, path in made.items()}
            best = dict.fromkeys(both, float("inf"))
            for _ in range(ROUNDS):
                for name, one in both.items():
                    best[name] = min(best[name], one.microseconds())
            for name, took in best.items():
                total[name] += took * count / 1e3
            words = ", ".join(f"{name} {best[name]:.2f} us ({one.distance():.1e})" for name, one in both.items())
            print(f"{rows}x{n}x{k}{' and gate' if gate else ''}, {count} in a step: {words}", flush=True)
    print("a step, ms: " + ", ".join(f"{name} {took:.2f}" for name, took in total.items()))


if __name__ == "__main__":
    main()
