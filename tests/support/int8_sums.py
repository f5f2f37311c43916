"""What this processor's int8 products are worth."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


@cache
def sums_are_cut() -> bool:
    """Whether MatMulInteger of uint8 and int8 gives less than the sum of the products.

    Processors without VNNI (AVX2 only) add two products up in 16 bits, and what is more than these hold is cut. A weight in
    the whole range of int8 then loses as much as happens to be cut; one in a reduced range loses nothing by it.
    """
    given, weight = np.full((2, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, given.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [2, 32])],
        [numpy_helper.from_array(weight, "w")],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": given})
    return not np.array_equal(found, given.astype(np.int32) @ weight.astype(np.int32))
