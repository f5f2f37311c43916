"""The 16-bit numbers that a graph has on purpose, and what they were before they were rounded.

A graph's own numbers (the scale of an unfused attention, a factor) have no recipes. Any real number that rounds to one may stand
for it; the simplest is taken, of the kinds in FORMS, or one that is PUBLISHED. What is no such number, tables too, is taken as
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdflow.onnx_model.facts import dtype_name
from sdflow.verify.lowering import before_angles
from sdflow.verify.lowering.builder import HALVES

LARGEST_WHOLE = 512
"""Of the whole numbers below: heads have at most so many channels."""

FORMS: tuple[Callable[[int], float], ...] = (
    lambda whole: float(whole),
    lambda whole: whole / 10,
    lambda whole: whole / 100,
    lambda whole: whole / 1000,
    lambda whole: whole**-0.5,  # an attention's scale
    lambda whole: whole**-0.25,  # the same, of both factors of the product
    lambda whole: whole**0.5,
    lambda whole: whole**0.25,
)
"""What whole numbers make. The simplest first."""

PUBLISHED = (1.702,)  # QuickGELU, https://arxiv.org/abs/1606.08415, section 2
"""Numbers that models have from papers, of no such form."""


def unrounded_number(value: float, dtype: str = "float16") -> float:
    """The simplest number that rounds to a float16 or bfloat16; the value itself where there is none."""
    magnitude = _simplest(dtype).get(abs(value), abs(value))
    return -magnitude if value < 0 else magnitude


@cache
def _simplest(dtype: str) -> dict[float, float]:
    import ml_dtypes  # noqa: F401 - gives numpy the name bfloat16

    rounded = np.dtype(dtype).type
    formed = (form(whole) for form in FORMS for whole in range(1, LARGEST_WHOLE + 1))
    found: dict[float, float] = {}
    for number in (*formed, *PUBLISHED):
        found.setdefault(float(rounded(number)), number)
    return found


def take_constants(model: Any, taken: MutableMapping[str, NDArray[Any]]) -> None:
    """Put the graph's own 16-bit numbers, as they were before they were rounded, into `taken`: name -> float32. Constant nodes
    among them become initializers. What sines and indices are computed from stays. Changes `model`."""
    import onnx

    kept = before_angles(model.graph.node)
    for tensor, node in [*_numbers(model.graph)]:
        if tensor.name in kept or tensor.name in taken:
            continue
        if node is not None:
            model.graph.initializer.add().CopyFrom(tensor)
            model.graph.node.remove(node)
        value = float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
        number = unrounded_number(value, dtype_name(tensor.data_type))
        taken[tensor.name] = np.full(tuple(tensor.dims), number, np.float32)


def _numbers(graph: Any) -> Iterator[tuple[Any, Any]]:
    """16-bit tensors of one value, and the Constant node that has it, or None."""
    import onnx

    for tensor in graph.initializer:
        if tensor.data_type in HALVES and _is_number(tensor):
            yield tensor, None
    for node in graph.node:
        for item in node.attribute:
            if (
                node.op_type == "Constant"
                and item.name == "value"
                and item.t.data_type in HALVES
                and _is_number(item.t)
            ):
                tensor = onnx.TensorProto()
                tensor.CopyFrom(item.t)
                tensor.name = node.output[0]
                yield tensor, node


def _is_number(tensor: Any) -> bool:
    return prod(tensor.dims) == 1 and not tensor.external_data
