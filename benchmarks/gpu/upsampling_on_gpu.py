"""Compare upsampling by 2 with its following 3x3 convolution on CUDA: NhwcResize convolves after it, SubpixelConv
before it.

    python benchmarks/gpu/upsampling_on_gpu.py [--target cpu --sides 8]

Prints median milliseconds of a layer at the sizes of decoders and UNets, in sessions like sdflow's: several layers with
separate tensors and weights in one CUDA graph, so that all data comes from memory. `plain` is SubpixelConv with ONNX
Runtime's operators alone. Distances (relative L2) are to the first variant. Use `--target cpu` to try it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

LAYERS, SECONDS = 3, 0.3
SHAPES = (
    ("SDXL's decoder", 512, 128, 1), ("SDXL's decoder", 512, 256, 1), ("SDXL's decoder", 256, 512, 1),
    ("SDXL's UNet", 1280, 32, 2), ("SDXL's UNet", 640, 64, 2),
    ("1.5's decoder", 512, 64, 1), ("1.5's decoder", 512, 128, 1), ("1.5's decoder", 256, 256, 1),
    ("1.5's UNet", 1280, 8, 2), ("1.5's UNet", 1280, 16, 2), ("1.5's UNet", 640, 32, 2),
    ("1.5's UNet", 1280, 8, 16), ("1.5's UNet", 1280, 16, 16), ("1.5's UNet", 640, 32, 16),
)  # fmt: skip
"""Whose, channels, the small image's side, images."""
WAYS = {"after": ("NhwcResize", True), "before": ("SubpixelConv", True), "plain": ("SubpixelConv", False)}
"""The pass, and whether our kernels run."""


def layers(channels: int, side: int, images: int) -> Any:
    """Independent layers as the fusions for CUDA leave them, in float32."""
    from onnx import TensorProto, helper, numpy_helper

    random, shape = np.random.default_rng(0), [images, side, side, channels]
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    weights = [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")]
    nodes = []
    for i in range(LAYERS):
        kernel = random.standard_normal((channels, 3, 3, channels), np.float32) / (3 * channels**0.5)
        bias = random.standard_normal(channels, np.float32)
        weights += [numpy_helper.from_array(kernel, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        nodes += [
            helper.make_node("Transpose", [f"x{i}"], [f"nchw{i}"], perm=[0, 3, 1, 2]),
            helper.make_node("Resize", [f"nchw{i}", "", "scales"], [f"large{i}"], f"resize{i}", **nearest),
            helper.make_node("Transpose", [f"large{i}"], [f"nhwc{i}"], perm=[0, 2, 3, 1]),
            helper.make_node(
                "NhwcConv", [f"nhwc{i}", f"w{i}", f"b{i}"], [f"y{i}"], f"conv{i}",
                domain="com.microsoft", kernel_shape=[3, 3], pads=[1] * 4,
            ),
        ]  # fmt: skip
    x = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i in range(LAYERS)]
    y = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(LAYERS)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "layers", x, y, weights), opset_imports=opsets, ir_version=8)


def halved(model: Any) -> None:
    """Make a model float16, in place: nothing in it has a type of its own."""
    from onnx import TensorProto, numpy_helper

    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for item in (*model.graph.input, *model.graph.output):
        item.type.tensor_type.elem_type = TensorProto.FLOAT16


def after_pass(name: str, model: Any, folder: Path, half: bool) -> Path:
    """The path of the model that a pass makes."""
    import onnx

    from sdflow.passes.base import PassInputs
    from sdflow.passes.registry import OWN

    source, out = folder / "source", folder / name
    source.mkdir(exist_ok=True)
    out.mkdir()
    onnx.save(model, source / "model.onnx", save_as_external_data=True, location="weights")
    implementation = getattr(import_module(OWN[name]), name)
    implementation().run(PassInputs("unet", source, {}), out, implementation.Config())
    made = onnx.load(out / "model.onnx")
    if half:
        halved(made)
        onnx.save(made, out / "model.onnx")
    return out / "model.onnx"


def measured(path: Path, target: str, own_kernels: bool, inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Milliseconds of a layer, and the last one's result."""
    import onnx

    from sdflow.runtime.sessions.bound import Bound
    from sdflow.runtime.sessions.place import place
    from sdflow.runtime.sessions.session import LoadOptions, create_session
    from sdflow.runtime.sessions.specialize import specialize
    from sdflow.runtime.sessions.tuning import Tuning
    from sdflow.targets import TARGETS
    from sdflow.verify.lowering import lower

    where = place("cuda" if target == "cuda" else "cpu")
    graph = specialize(onnx.load(path, load_external_data=False), {})
    if target == "cpu":
        graph = specialize(lower(graph).model, {})
    stream = None if where.stream is None else where.stream.cuda_stream
    options = LoadOptions(tuning=Tuning(own_kernels=own_kernels), stream=stream)
    with where.current():
        session = create_session(path, TARGETS[target], options, graph=graph, capture=True)
        bound = Bound(session, where, {name: value.to(where.device) for name, value in inputs.items()})
        for _ in range(3):
            result = bound.run()[f"y{LAYERS - 1}"]
        times, end = [], time.perf_counter() + SECONDS
        while len(times) < 5 or time.perf_counter() < end:
            if target == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            bound.run()
            if target == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return statistics.median(times) * 1000 / LAYERS, result.float().clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sides", type=int, help="of the small images, all of them, in place of the models' own")
    arguments = parser.parse_args()
    print(f"{'':44}" + "".join(f"{way:>9}" for way in WAYS) + "   distances")
    for whose, channels, own_side, images in SHAPES:
        side = arguments.sides or own_side
        for half in (False, True) if whose == "SDXL's decoder" else (True,):
            dtype = torch.float16 if half else torch.float32
            inputs = {f"x{i}": torch.randn(images, side, side, channels).to(dtype) for i in range(LAYERS)}
            with tempfile.TemporaryDirectory() as folder:
                model = layers(channels, side, images)
                paths = {name: after_pass(name, model, Path(folder), half) for name in ("NhwcResize", "SubpixelConv")}
                found = [measured(paths[name], arguments.target, own, inputs) for name, own in WAYS.values()]
            first = found[0][1]
            distances = [float((result - first).norm() / first.norm()) for _, result in found[1:]]
            label = f"{whose}, {channels} channels, {side} to {2 * side}, {images}, {'float16' if half else 'float32'}"
            times = "".join(f"{each:9.3f}" for each, _ in found)
            print(f"{label:44}{times}   {' '.join(f'{each:.0e}' for each in distances)}", flush=True)


if __name__ == "__main__":
    main()
