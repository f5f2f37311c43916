"""Recover the 16-bit constants of a graph as they were before rounding.

A graph's own constants (the scale of an unfused attention, a factor) have no recipes. Many real numbers round to the
same constant; the simplest of the kinds in FORMS, or one of PUBLISHED, is taken. Other constants, including tables,
stay unchanged.
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
"""Largest whole number used in FORMS: heads have at most this many channels."""

FORMS: tuple[Callable[[int], float], ...] = (
    lambda whole: float(whole),
    lambda whole: whole / 10,
    lambda whole: whole / 100,
    lambda whole: whole / 1000,
    lambda whole: whole**-0.5,  # an attention's scale
    lambda whole: whole**-0.25,  # the same, split over both factors of the product
    lambda whole: whole**0.5,
    lambda whole: whole**0.25,
)
"""Numbers made of whole numbers, the simplest forms first."""

PUBLISHED = (1.702,)  # QuickGELU, https://arxiv.org/abs/1606.08415, section 2
"""Constants from papers that have no such form."""


def unrounded_number(value: float, dtype: str = "float16") -> float:
    """The simplest number that rounds to a float16 or bfloat16; the value itself if there is none."""
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
    """Put the graph's own 16-bit constants, as before rounding, into `taken`: name -> float32. Constant nodes among
    them become initializers; inputs of sines and indices stay. Changes `model`."""
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
    """16-bit tensors of one value, each with its Constant node or None."""
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
