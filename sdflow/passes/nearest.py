"""Which Resize repeats every pixel a whole number of times."""

from __future__ import annotations

from typing import Any

from sdflow.passes.graph_edit import GraphEdit


def whole_factor(edit: GraphEdit, resize: Any) -> int:
    """k, if `resize` repeats each pixel k times in both directions; otherwise 0."""
    from onnx import helper

    settings = {item.name: helper.get_attribute_value(item) for item in resize.attribute}
    repeats = (
        settings.get("mode", b"nearest") == b"nearest"
        and settings.get("coordinate_transformation_mode", b"half_pixel") == b"asymmetric"
        and settings.get("nearest_mode", b"round_prefer_floor") == b"floor"
    )
    scales = _value(edit, resize.input[2]) if repeats and len(resize.input) == 3 else None
    if scales is None or len(scales) != 4:
        return 0
    batch, channels, height, width = (float(scale) for scale in scales)
    whole = batch == channels == 1 and height == width and height == int(height) > 1
    return int(height) if whole else 0


def _value(edit: GraphEdit, name: str) -> Any | None:
    """The values of a constant, seen through casts; None for anything else."""
    from onnx import helper, numpy_helper

    if name in edit.weights:
        return numpy_helper.to_array(edit.weights[name])
    node = edit.producers.get(name)
    if node is not None and node.op_type == "Cast":
        return _value(edit, node.input[0])
    if node is None or node.op_type != "Constant":
        return None
    return next(
        (numpy_helper.to_array(helper.get_attribute_value(a)) for a in node.attribute if a.name == "value"), None
    )
