"""Matching of Resize nodes that repeat each pixel a whole number of times, and their NHWC input."""

from __future__ import annotations

from typing import Any

from sdflow.onnx_model.nodes import attributes
from sdflow.passes.graph_edit import GraphEdit

TO_NCHW = [0, 3, 1, 2]
TO_NHWC = [0, 2, 3, 1]


def whole_factor(edit: GraphEdit, resize: Any) -> int:
    """Return k if `resize` repeats each pixel k times in both directions, otherwise 0."""

    settings = attributes(resize)
    repeats = (
        settings.get("mode", b"nearest") == b"nearest"
        and settings.get("coordinate_transformation_mode", b"half_pixel") == b"asymmetric"
        and settings.get("nearest_mode", b"round_prefer_floor") == b"floor"
    )
    scales = constant_value(edit, resize.input[2]) if repeats and len(resize.input) == 3 else None
    if scales is None or len(scales) != 4:
        return 0
    batch, channels, height, width = (float(scale) for scale in scales)
    whole = batch == channels == 1 and height == width and height == int(height) > 1
    return int(height) if whole else 0


def to_nhwc(edit: GraphEdit, resize: Any) -> Any | None:
    """Return the Transpose to NHWC if it is the only reader of `resize`'s output, otherwise None."""
    back = edit.only_reader(resize.output[0])
    return back if back is not None and _permutes(back, TO_NHWC) else None


def source_in_nhwc(edit: GraphEdit, resize: Any, name: str) -> tuple[str, list[Any]]:
    """Return `resize`'s input in NHWC and the nodes that produce it. name: prefix of their names."""
    from onnx import helper

    before = edit.producers.get(resize.input[0])
    if before is not None and _permutes(before, TO_NCHW):
        return before.input[0], []
    value = f"{name}/nhwc"
    return value, [helper.make_node("Transpose", [resize.input[0]], [value], f"{name}/Transpose", perm=TO_NHWC)]


def _permutes(node: Any, axes: list[int]) -> bool:
    return bool(node.op_type == "Transpose" and list(node.attribute[0].ints) == axes)


def constant_value(edit: GraphEdit, name: str) -> Any | None:
    """Return the values of a constant, looking through casts; None for anything else."""
    from onnx import helper, numpy_helper

    if name in edit.weights:
        return numpy_helper.to_array(edit.weights[name])
    node = edit.producers.get(name)
    if node is not None and node.op_type == "Cast":
        return constant_value(edit, node.input[0])
    if node is None or node.op_type != "Constant":
        return None
    return next(
        (numpy_helper.to_array(helper.get_attribute_value(a)) for a in node.attribute if a.name == "value"), None
    )
