"""Compare lowered operators with the real CUDA kernels: `python benchmarks/verify/lowering_on_gpu.py [--cases 20]
[--seed 0]`.

Draws random shapes, attributes and optional inputs as in Stable Diffusion's graphs, in float16. Runs each node on the
CUDA provider, and lowered on the CPU, and prints one line per operator. Differences are in float16 units in the last
place, of the value or, for smaller values, of the root mean square of the result. The exit status is 1 if an operator
disagrees. Needs numpy, onnx, onnxruntime-gpu, torch (for its CUDA libraries) and this repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from sdflow.verify.lowering import OPERATORS, lower, session_of

LIMIT = 16.0
"""Largest difference allowed, in units in the last place: some roundings inside of the kernels, no more."""

Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """One node: inputs by name (None: not given), which of them are initializers, attributes, number of outputs."""

    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("y",)


def half(rng: Rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float16)


def maybe(rng: Rng, value: Any) -> Any:
    return value if rng.random() < 0.5 else None


def pick(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def gelu(rng: Rng) -> Case:
    return Case({"x": half(rng, pick(rng, 1, 2), pick(rng, 1, 77), pick(rng, 64, 768, 3072), scale=2)})


def bias_gelu(rng: Rng) -> Case:
    x = gelu(rng).inputs["x"]
    return Case({"x": x, "b": half(rng, x.shape[-1])}, weights=("b",))


def fast_gelu(rng: Rng) -> Case:
    case = bias_gelu(rng)
    return case if rng.random() < 0.5 else Case({"x": case.inputs["x"]})


def quick_gelu(rng: Rng) -> Case:
    return Case(gelu(rng).inputs, {"alpha": pick(rng, 1.702, 1.0)})


def bias_split_gelu(rng: Rng) -> Case:
    width = pick(rng, 2560, 5120, 10240)
    return Case({"x": half(rng, pick(rng, 1, 2), pick(rng, 16, 64, 256), width), "b": half(rng, width)}, weights=("b",))


def bias_add(rng: Rng) -> Case:
    shape = (pick(rng, 1, 2), pick(rng, 16, 64, 256), pick(rng, 320, 640, 1280))
    return Case({"x": half(rng, *shape), "b": half(rng, shape[-1]), "s": half(rng, *shape)}, weights=("b",))


def group_norm(rng: Rng) -> Case:
    channels = pick(rng, 128, 256, 320, 512, 640, 960, 1280, 1920, 2560)
    shape = (pick(rng, 1, 2), pick(rng, 4, 8, 16), pick(rng, 4, 8, 16), channels)
    gamma, beta = (rng.standard_normal(channels).astype(np.float32) for _ in range(2))
    inputs = {"x": half(rng, *shape, scale=2) + np.float16(pick(rng, 0, 1)), "g": gamma, "b": beta}
    attributes = {"groups": 32, "activation": pick(rng, 0, 1), "epsilon": pick(rng, 1e-5, 1e-6), "channels_last": 1}
    return Case(inputs, attributes, weights=("g", "b"))


def skip_group_norm(rng: Rng) -> Case:
    case = group_norm(rng)
    n, h, w, c = case.inputs["x"].shape
    skip = half(rng, *pick(rng, (n, h, w, c), (n, 1, 1, c), (n, c)))
    inputs = {**case.inputs, "skip": skip, "bias": maybe(rng, half(rng, c))}
    return Case(inputs, case.attributes, weights=("g", "b", "bias"), outputs=pick(rng, ("y",), ("y", "s")))


def nhwc_conv(rng: Rng) -> Case:
    kernel, stride = pick(rng, (1, 1), (3, 1), (3, 2))
    channels, out = pick(rng, 4, 64, 320), pick(rng, 8, 64, 320)
    pads = [kernel // 2] * 4 if stride == 1 else pick(rng, [1, 1, 1, 1], [0, 0, 1, 1])
    inputs = {"x": half(rng, pick(rng, 1, 2), pick(rng, 8, 16), pick(rng, 8, 12), channels)}
    inputs |= {"w": half(rng, out, kernel, kernel, channels, scale=(kernel * kernel * channels) ** -0.5)}
    inputs |= {"b": maybe(rng, half(rng, out))}
    attributes = {"kernel_shape": [kernel] * 2, "pads": pads, "strides": [stride] * 2, "dilations": [1, 1], "group": 1}
    return Case(inputs, attributes, weights=("w", "b"))


def skip_layer_normalization(rng: Rng) -> Case:
    n, s, c = pick(rng, 1, 2), pick(rng, 77, 256), pick(rng, 320, 640, 768, 1280)
    inputs = {"x": half(rng, n, s, c, scale=2), "skip": half(rng, n, s, c), "gamma": half(rng, c), "beta": half(rng, c)}
    inputs["bias"] = maybe(rng, half(rng, c))
    outputs = pick(rng, ("y",), ("y", "", "", "s"))
    return Case(inputs, {"epsilon": 1e-5}, weights=("gamma", "beta", "bias"), outputs=outputs)


def multi_head_attention(rng: Rng) -> Case:
    n, s, keys = pick(rng, 1, 2), pick(rng, 64, 256), pick(rng, 64, 77)
    heads, size = pick(rng, 5, 8), pick(rng, 40, 64, 80, 160)
    form = pick(rng, "qkv", "kv", "apart", "apart, bias", "apart, mask", "apart, added", "keys by head")
    if form == "qkv":
        return Case({"q": half(rng, n, s, heads, 3, size)}, {"num_heads": heads})
    inputs: dict[str, np.ndarray | None] = {"q": half(rng, n, s, heads * size)}
    if form == "kv":
        return Case(inputs | {"kv": half(rng, n, keys, heads, 2, size)}, {"num_heads": heads})
    if form == "keys by head":
        k, v = half(rng, n, heads, keys, size), half(rng, n, heads, keys, size)
        return Case(inputs | {"k": k, "v": v}, {"num_heads": heads})
    inputs |= {"k": half(rng, n, keys, heads * size), "v": half(rng, n, keys, heads * size)}
    inputs["bias"] = half(rng, 3 * heads * size) if form == "apart, bias" else None
    inputs["mask"] = rng.integers(1, keys + 1, n).astype(np.int32) if form == "apart, mask" else None
    inputs["added"] = half(rng, pick(rng, 1, n), pick(rng, 1, heads), s, keys) if form == "apart, added" else None
    attributes = {"num_heads": heads} | ({"scale": 0.1} if rng.random() < 0.5 else {})
    return Case(inputs, attributes, weights=("bias",))


def attention(rng: Rng) -> Case:
    n, s, heads, size = pick(rng, 1, 2), pick(rng, 64, 77), pick(rng, 8, 12), pick(rng, 32, 64)
    width = heads * size
    inputs = {"x": half(rng, n, s, width), "w": half(rng, width, 3 * width, scale=width**-0.5)}
    inputs |= {"b": half(rng, 3 * width), "mask": maybe(rng, rng.integers(1, s + 1, n).astype(np.int32))}
    return Case(inputs, {"num_heads": heads, "unidirectional": pick(rng, 0, 1)}, weights=("w", "b"))


DRAW: dict[str, Callable[[Rng], Case]] = {
    "Attention": attention,
    "BiasAdd": bias_add,
    "BiasGelu": bias_gelu,
    "BiasSplitGelu": bias_split_gelu,
    "FastGelu": fast_gelu,
    "Gelu": gelu,
    "GroupNorm": group_norm,
    "MultiHeadAttention": multi_head_attention,
    "NhwcConv": nhwc_conv,
    "QuickGelu": quick_gelu,
    "SkipGroupNorm": skip_group_norm,
    "SkipLayerNormalization": skip_layer_normalization,
}


def model_of(op_type: str, case: Case) -> onnx.ModelProto:
    given = {name: value for name, value in case.inputs.items() if value is not None}
    names = [name if name in given else "" for name in case.inputs]
    node = helper.make_node(op_type, names, case.outputs, op_type, domain="com.microsoft", **case.attributes)
    infos = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    }
    graph = helper.make_graph(
        [node],
        op_type,
        [info for name, info in infos.items() if name not in case.weights],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, None) for name in case.outputs if name],
        [numpy_helper.from_array(value, name) for name, value in given.items() if name in case.weights],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def on_gpu(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs from the CUDA provider. Raises onnxruntime's error where it has no kernel for the node or refuses it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    return list(session.run(None, feeds))


def units(gpu: np.ndarray, cpu: np.ndarray) -> tuple[float, float]:
    """Largest difference in units in the last place, and the relative L2 distance."""
    a, b = gpu.astype(np.float64), cpu.astype(np.float64)
    size = np.maximum(np.abs(b), np.sqrt(np.mean(b**2))).astype(np.float16)
    largest = np.abs(a - b) / np.spacing(size).astype(np.float64)
    distance = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return (float(largest.max()) if np.isfinite(a).all() else float("inf")), distance


def compare(op_type: str, rng: Rng, cases: int) -> Iterator[tuple[float, float] | str]:
    """For each case the difference, or the words with which CUDA refused it."""
    for _ in range(cases):
        case = DRAW[op_type](rng)
        model = model_of(op_type, case)
        feeds = {item.name: case.inputs[item.name] for item in model.graph.input}
        on_cpu = session_of(lower(model), Path()).run(None, feeds)
        try:
            results = on_gpu(model, feeds)
        except (onnxruntime.capi.onnxruntime_pybind11_state.EPFail,
                onnxruntime.capi.onnxruntime_pybind11_state.Fail,
                onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented,
                onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
                onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException) as error:  # fmt: skip
            yield str(error).splitlines()[0]
            continue
        differences = [units(gpu, cpu) for gpu, cpu in zip(results, on_cpu, strict=True)]
        yield max(item[0] for item in differences), max(item[1] for item in differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20, help="for each operator")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print("this ONNX Runtime has no CUDA provider", file=sys.stderr)
        return 5
    if missing := set(OPERATORS) - set(DRAW):
        print(f"no cases for {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    print(f"onnxruntime {onnxruntime.__version__}, {torch.cuda.get_device_name()}, seed {arguments.seed}, float16")
    print(f"{'operator':24} {'cases':>5} {'refused':>7} {'largest, units':>14} {'distance, L2':>12}")
    wrong: list[str] = []
    refusals: dict[str, set[str]] = {}
    for index, op_type in enumerate(DRAW):
        results = list(compare(op_type, np.random.default_rng([arguments.seed, index]), arguments.cases))
        compared = [item for item in results if not isinstance(item, str)]
        refusals[op_type] = {item for item in results if isinstance(item, str)}
        largest = max((item[0] for item in compared), default=float("nan"))
        distance = max((item[1] for item in compared), default=float("nan"))
        agrees = largest <= LIMIT
        wrong += [] if agrees else [op_type]
        refused = len(results) - len(compared)
        mark = "" if agrees else "  DISAGREES" if compared else "  NOT COMPARED"
        print(f"{op_type:24} {len(compared):5} {refused:7} {largest:14.2f} {distance:12.1e}{mark}", flush=True)
    for op_type, messages in refusals.items():
        for message in sorted(messages):
            print(f"{op_type} refused by CUDA: {message[:300]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
