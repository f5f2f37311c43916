"""Compare matrix products of Stable Diffusion 1.5's UNet in int8, as `QuantizeInt8` creates them, with float32, by
size.

    python benchmarks/cpu/int8_products.py [--rounds 3]

One thread. Reports the fastest processor time of a product, including quantization of its input.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.passes.base import PassInputs
from sdflow.passes.quantize_int8 import QuantizeInt8, QuantizeInt8Config

SIZES = (
    (8192, 320, 320),
    (8192, 320, 2560),
    (8192, 1280, 320),
    (2048, 640, 5120),
    (2048, 2560, 640),
    (512, 1280, 10240),
)
"""Rows of two latents of 64x64 and below, channels in, channels out: projections, and both products of a feed-forward."""


def session(model: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    for rows, inner, outer in SIZES:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, inner])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, outer])],
            [numpy_helper.from_array(random.standard_normal((inner, outer)).astype(np.float32), "w")],
        )
        with tempfile.TemporaryDirectory() as scratch:
            plain, quantized = Path(scratch) / "plain", Path(scratch) / "quantized"
            plain.mkdir(), quantized.mkdir()
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
            onnx.save(model, plain / "model.onnx")
            QuantizeInt8().run(PassInputs("unet", plain, {}), quantized, QuantizeInt8Config())
            feeds = {"x": random.standard_normal((rows, inner)).astype(np.float32)}
            sessions = {folder.name: session(folder / "model.onnx") for folder in (plain, quantized)}
            best = dict.fromkeys(sessions, float("inf"))
            for _ in range(options.rounds + 1):
                for name, each in sessions.items():
                    begun = time.process_time()
                    each.run(None, feeds)
                    best[name] = min(best[name], time.process_time() - begun)
        took = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in best.items()}
        ratio = best["quantized"] / best["plain"]
        print(f"{rows} x {inner} x {outer}: float32 {took['plain']}, int8 {took['quantized']}: {ratio:.2f}")


if __name__ == "__main__":
    main()
