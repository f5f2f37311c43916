"""Run one of sdflow's operators in a session of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN

_FLOAT = "/float"
"""Suffix of the float32 name of a bfloat16 value."""


def in_order(names: Iterable[str], given: Iterable[str]) -> list[str]:
    """Return an operator's input names with "" for missing ones, without trailing ""."""
    there = set(given)
    found = [name if name in there else "" for name in names]
    while not found[-1]:
        found.pop()
    return found


def run_node(
    library: Path,
    operator: str,
    feeds: Mapping[str, Any],
    results: Mapping[str, tuple[int, Sequence[int] | None]],
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run one operator on the current CUDA device and return its outputs by name; bfloat16 as float32.

    results: element type and shape of the wanted outputs. inputs, outputs: the operator's, in order; default: those of
    `feeds` and `results`. ONNX Runtime does not accept numpy's bfloat16, so casts surround the operator.
    """
    import numpy as np
    import torch
    from onnx import TensorProto, helper

    node = helper.make_node(
        operator, inputs or [*feeds], outputs or [*results], "ours", domain=DOMAIN, **(attributes or {})
    )
    brain = {
        each for each, value in feeds.items() if helper.np_dtype_to_tensor_dtype(value.dtype) == TensorProto.BFLOAT16
    }
    given = {f"{each}{_FLOAT}": feeds[each].astype(np.float32) for each in brain}
    given |= {each: value for each, value in feeds.items() if each not in brain}
    wide = [each for each, (element, _) in results.items() if element == TensorProto.BFLOAT16]
    wanted = {
        f"{each}{_FLOAT}" if each in wide else each: (TensorProto.FLOAT if each in wide else element, shape)
        for each, (element, shape) in results.items()
    }
    nodes = [helper.make_node("Cast", [f"{name}{_FLOAT}"], [name], to=TensorProto.BFLOAT16) for name in brain]
    nodes += [node, *(helper.make_node("Cast", [name], [f"{name}{_FLOAT}"], to=TensorProto.FLOAT) for name in wide)]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    graph = helper.make_graph(
        nodes, operator, infos, [helper.make_tensor_value_info(name, *each) for name, each in wanted.items()]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    provider = ("CUDAExecutionProvider", {"device_id": str(torch.cuda.current_device())})
    session = ort.InferenceSession(model.SerializeToString(), options, providers=[provider], enable_fallback=0)
    return dict(zip(results, session.run([*wanted], given), strict=True))


def result_of(
    library: Path,
    operator: str,
    feeds: Mapping[str, Any],
    shape: Sequence[int],
    element: int | None = None,
    **more: Any,
) -> Any:
    """Return an operator's single result, float16 by default. more: see `run_node`."""
    from onnx import TensorProto

    result = TensorProto.FLOAT16 if element is None else element, shape
    return run_node(library, operator, feeds, {"y": result}, **more)["y"]
