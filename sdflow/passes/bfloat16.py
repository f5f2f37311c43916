"""bfloat16 conversion through ONNX Runtime's float16 converter.

ONNX Runtime only converts to float16. Which values become 16-bit does not depend on the 16-bit type, so the converter
runs unchanged on weights with bfloat16 bits, and float16 is then relabeled as bfloat16 throughout the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdflow.onnx_model.facts import subgraphs
from sdflow.onnx_model.stub import is_stub
from sdflow.processes.patched import patched

NO_KERNEL = (
    "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "BiasAdd", "BiasSplitGelu", "Ceil", "Clip", "Conv",
    "ConvTranspose", "Cos", "CumSum", "DepthToSpace", "Einsum", "Elu", "Equal", "Floor", "GlobalAveragePool",
    "GlobalMaxPool", "Greater", "GreaterOrEqual", "GroupNorm", "HardSigmoid", "HardSwish", "InstanceNormalization",
    "LRN", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "MaxPool", "NhwcConv", "NonZero",
    "OneHot", "PRelu", "Pad", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax",
    "ReduceMin", "ReduceProd", "ReduceSumSquare", "Resize", "Round", "Selu", "Shrink", "Sin", "SkipGroupNorm",
    "Softplus", "Softsign", "SpaceToDepth", "ThresholdedRelu",
)  # fmt: skip
"""Operators that ONNX Runtime 1.31's CUDA provider supports in float16 but not in bfloat16 (opset 17); they stay
float32. A test compares the list with the provider's kernel table."""


@contextmanager
def bfloat16_bits() -> Iterator[None]:
    """While active, ONNX Runtime's converter writes bfloat16 bits into the tensors that it labels float16.

    Stubs get float16 recipes, which `relabel` corrects.
    """
    from sdflow.weights import half

    importlib.import_module("sdflow.weights.recipe")  # imports to_float16 by name: before it is replaced
    packaged, loose = (importlib.import_module(name) for name in ("onnxruntime.transformers.float16", "float16"))
    with (
        patched(packaged, convert_np_to_float16=_bits),
        patched(loose, convert_np_to_float16=_bits),
        patched(half, to_float16=_bits),
    ):
        yield


def _bits(values: Any, *limits: float) -> Any:
    """Return the nearest bfloat16 values, with their bits viewed as float16."""
    import numpy as np

    from sdflow.weights.half import to_bfloat16

    return to_bfloat16(np.asarray(values, np.float32)).view(np.float16)


def relabel(model: Any) -> None:
    """Change float16 to bfloat16 in a converted model: tensors, stub recipes, attributes and value infos."""
    import onnx

    half, brain = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
    for graph in subgraphs(model.graph):
        tensors = list(graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                tensors += [attribute.t, *attribute.tensors]
                if attribute.name in ("to", "dtype") and attribute.i == half:
                    attribute.i = brain
        for tensor in tensors:
            if is_stub(tensor):
                _relabel_stub(tensor)
            elif tensor.data_type == half:
                tensor.data_type = brain
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == half:
                value.type.tensor_type.elem_type = brain


def _relabel_stub(tensor: Any) -> None:
    from sdflow.weights.recipe import Bfloat16, Float16
    from sdflow.weights.stubs import make_stub, stub_recipe

    recipe = stub_recipe(tensor)
    if isinstance(recipe, Float16):
        make_stub(tensor, Bfloat16(recipe.of))
