"""Integer ArgMax for CUDA.

ONNX Runtime's CUDA provider has no kernel for it (1.31.1), so text encoders of pipelines built before sdflow traced
another form would compute the end of a text on the CPU: their graph could not be captured, and on an H200 the pooled
embedding was wrong, because runs are queued without waiting for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def with_float_argmax(model: onnx.ModelProto) -> bool:
    """Convert the integer inputs of ArgMax to float32 in place; whether there were any. float32 represents integers up
    to 2^24, and vocabularies are smaller.

    Only inputs of the graph and results of Cast have a known type; others are left as they are.
    """
    from onnx import TensorProto, helper

    integers = (TensorProto.INT32, TensorProto.INT64)
    known = {value.name for value in model.graph.input if value.type.tensor_type.elem_type in integers}
    known |= {
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Cast" and any(each.name == "to" and each.i in integers for each in node.attribute)
    }
    found = [node for node in model.graph.node if node.op_type == "ArgMax" and node.input[0] in known]
    for node in found:
        name = f"{node.output[0]}/as_float32"
        cast = helper.make_node("Cast", [node.input[0]], [name], name, to=TensorProto.FLOAT)
        place = next(index for index, each in enumerate(model.graph.node) if each is node)
        node.input[0] = name
        model.graph.node.insert(place, cast)
    return bool(found)
