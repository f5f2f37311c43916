"""Changes to the graph of a CLIP text encoder as it is loaded; the artifact stays as it is.

Learned vectors (textual inversion) are rows behind the table of the vocabulary, which ids below 0 count from its end. Layers
that are left out (CLIP skip) are passed by: the last norm takes the place of the one that read what went into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.onnx_model.nodes import copied, in_order

if TYPE_CHECKING:
    import numpy as np
    import onnx

_NORMS = {"LayerNormalization": 1, "SkipLayerNormalization": 2}
"""Operators that normalize -> which of their inputs is the scale; the bias is the next."""


def add_vectors(model: onnx.ModelProto, vectors: np.ndarray, config: Mapping[str, Any]) -> None:
    """Put (vectors, width) float32 behind the rows of the table of tokens, in the table's type.

    Raises UsageError where the graph holds no such table.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    wanted = [config["vocab_size"], config["hidden_size"]]
    tables = {tensor.name: tensor for tensor in graph.initializer if list(tensor.dims) == wanted}
    lookups = [node for node in graph.node if node.op_type == "Gather" and node.input[0] in tables]
    if len(lookups) != 1 or tables[lookups[0].input[0]].data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        raise UsageError(
            "the graph of the text encoder was changed so that words cannot be added to it",
            where="embeddings",
            remedy="Leave out passes that quantize or replace its table of tokens, and build the pipeline again.",
        )
    (lookup,) = lookups
    table = tables[lookup.input[0]]
    dtype: Any = helper.tensor_dtype_to_np_dtype(table.data_type)
    graph.initializer.append(numpy_helper.from_array(np.asarray(vectors, dtype), "learned_vectors"))
    joined = helper.make_node("Concat", [table.name, "learned_vectors"], ["all_vectors"], axis=0)
    graph.node.insert(0, joined)
    lookup.input[0] = "all_vectors"


def leave_out_layers(model: onnx.ModelProto, count: int, config: Mapping[str, Any]) -> None:
    """Leave out the last layers of a text encoder whose last norm reads what the last one gave.

    A layer has two norms, the first reads what goes into the layer: that of the first layer left out gets the last norm's
    scale and bias, and what read the last norm reads this one.
    Raises UsageError where the graph has not two norms for each layer, and one.
    """
    nodes = [copied(node) for node in in_order(model.graph.node)]
    norms = [node for node in nodes if node.op_type in _NORMS]
    layers = config["num_hidden_layers"]
    if len(norms) != 2 * layers + 1:
        raise UsageError(
            f"the graph of the text encoder has {len(norms)} norms, and {layers} layers have {2 * layers + 1}: it was "
            "changed so that none of them can be left out",
            where="clip_skip",
            remedy="Leave out passes that fuse or replace its norms, and build the pipeline again.",
        )
    last, norm = norms[-1], norms[2 * (layers - count)]
    taking_over = copied(norm)
    for offset in range(2):
        taking_over.input[_NORMS[norm.op_type] + offset] = last.input[_NORMS[last.op_type] + offset]
    del taking_over.output[:]
    taking_over.output.append(last.output[0])
    taking_over.name, last.output[0] = "last_norm_of_fewer_layers", "last_norm_of_all_layers"
    nodes.insert(nodes.index(norm) + 1, taking_over)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
