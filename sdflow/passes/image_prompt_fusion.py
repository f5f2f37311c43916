"""MultiHeadAttention fusion for UNets with IP-Adapters, which onnxruntime.transformers does not match.

Besides the attention to the text there is one to each adapter's image tokens, with the same query. Their results are
added and share one projection:

    to_out(attention(q, text) + scale_0 * attention(q, images_0) + scale_1 * attention(q, images_1) ...)

`FusionAttentionUnet` expects a single attention right before the projection. Here ORT's own code matches and creates
each one, so they are packed, counted and named like all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sdflow.processes.patched import patched


@contextlib.contextmanager
def image_prompt_attention() -> Iterator[None]:
    """While active, ORT's UNet fusions also fuse these attentions."""
    from onnxruntime.transformers import optimizer  # noqa: F401  adds the folder of the fusions to sys.path

    fusion = __import__("fusion_attention_unet").FusionAttentionUnet
    original = fusion.fuse

    def fuse(self: Any, normalize: Any, readers: Any, writers: Any) -> None:
        original(self, normalize, readers, writers)
        if self.is_cross_attention:
            _fuse(self, normalize, readers, writers)

    with patched(fusion, fuse=fuse):
        yield


def _fuse(self: Any, normalize: Any, readers: Any, writers: Any) -> None:
    """Fuse the attentions behind a LayerNormalization.

    self: FusionAttentionUnet. normalize: the LayerNormalization before a cross-attention. readers, writers: value ->
    the nodes that read it, the node that produces it.
    """
    before = writers.get(normalize.input[0])
    if before is None or before.op_type != "Add":
        return
    root = before.output[0]
    skip = next((node for node in readers[root] if node.op_type == "Add"), None)
    if skip is None:
        return
    bias = writers.get(skip.input[1 if skip.input[0] == root else 0])
    product = _parent(bias, "Add", "MatMul", writers)
    total = _parent(product, "MatMul", "Add", writers)
    reshapes = _terms(total, writers) if total is not None else []
    found = [_matched(self, root, skip, reshape, writers) for reshape in reshapes]
    if len(found) < 2 or None in found:
        return
    for _, reshape, transpose, query, *products in found:
        heads, width = self.get_num_heads_and_hidden_size(query, normalize, True)
        node = (
            self.create_attention_node(*products, heads, width, input=normalize.output[0], output=reshape.output[0])
            if heads > 0
            else None
        )
        if node is None:
            return
        self.nodes_to_add.append(node)
        self.node_name_to_graph_name[node.name] = self.this_graph_name
        self.nodes_to_remove.extend([reshape, transpose])
        self.prune_graph = True


def _parent(node: Any, op_type: str, wanted: str, writers: Any) -> Any:
    """Return the producer of type `wanted` among the inputs of `node`, or None if `node` is not of `op_type`."""
    if node is None or node.op_type != op_type:
        return None
    return next((each for name in node.input if (each := writers.get(name)) and each.op_type == wanted), None)


def _terms(total: Any, writers: Any) -> list[Any]:
    """Return the Reshapes that a sum consists of, possibly scaled; empty if it has other terms."""
    found: list[Any] = []
    for name in total.input:
        node = writers.get(name)
        if node is not None and node.op_type == "Mul":
            node = _parent(node, "Mul", "Reshape", writers)
        if node is None or node.op_type not in ("Add", "Reshape"):
            return []
        inner = [node] if node.op_type == "Reshape" else _terms(node, writers)
        if not inner:
            return []
        found += inner
    return found


def _matched(self: Any, root: str, skip: Any, reshape: Any, writers: Any) -> Any:
    """Return ORT's match for this Reshape, as if it were right before the projection, or None."""
    transpose = _parent(reshape, "Reshape", "Transpose", writers)
    product = _parent(transpose, "Transpose", "MatMul", writers)
    if product is None:
        return None
    start = [skip, skip, reshape, transpose, product]
    return type(self).match_qkv_torch2(_At(self.model, skip, start), root, skip)


class _At:
    """Stands in for FusionAttentionUnet and its model during matching; the path from one node is fixed."""

    def __init__(self, model: Any, node: Any, start: list[Any]) -> None:
        self.model = self
        self._model, self._node, self._start = model, node, start

    def match_parent_path(self, node: Any, *path: Any) -> Any:
        return self._start if node is self._node else self._model.match_parent_path(node, *path)
