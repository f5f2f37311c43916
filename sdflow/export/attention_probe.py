"""A graph of one fused attention, with which a page tests whether the visitor's device computes it correctly.

ONNX Runtime's WebGPU kernel treats subgroups of up to 8 as subgroups of 8: with subgroups of 4, values are off by a
tenth and more, without an error. It applies from 32 rows on, for head sizes that are multiples of 4.
"""

from __future__ import annotations

from typing import Any

FUSED = ("Attention", "MultiHeadAttention")
CONTRIB = "com.microsoft"
SIZES = {"rows": 64, "keys": 40, "heads": 2, "size": 8}
"""size: of a head."""


def has_fused_attention(model: Any) -> bool:
    """Whether a ModelProto has nodes for such a kernel."""
    return any(node.op_type in FUSED and node.domain == CONTRIB for node in model.graph.node)


def attention_probe() -> bytes:
    """A model: q (1, rows, width), k and v (1, keys, width) -> attention (1, rows, width), float32; width: heads * size."""
    from onnx import TensorProto, helper

    width = SIZES["heads"] * SIZES["size"]
    lengths = {"q": SIZES["rows"], "k": SIZES["keys"], "v": SIZES["keys"], "attention": SIZES["rows"]}
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, count, width])
        for name, count in lengths.items()
    }
    made = infos.pop("attention")
    node = helper.make_node("MultiHeadAttention", [*infos], [made.name], domain=CONTRIB, num_heads=SIZES["heads"])
    graph = helper.make_graph([node], "attention", [*infos.values()], [made])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(deterministic=True)
    return model
