"""MultiHeadAttention with a mask in a diffusion transformer: onnxruntime.transformers matches these attentions without one only.

`FusionMultiHeadAttentionMMDit` expects the product of queries and keys right before the Softmax. Where a mask is added between them,
it is shown the product, and the operator that it makes gets the mask as `attention_bias`, (batch, 1, queries, keys).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sdflow.processes.patched import patched

_BIAS = 5
"""The place of `attention_bias` among MultiHeadAttention's inputs; the bias of the projections and the padding mask are left out."""


@contextlib.contextmanager
def masked_attention() -> Iterator[None]:
    """While active, the fusions of a diffusion transformer find attentions with a mask too."""
    from onnxruntime.transformers import optimizer  # noqa: F401  puts the folder of the fusions onto sys.path

    fusion = __import__("fusion_mha_mmdit").FusionMultiHeadAttentionMMDit
    original = fusion.fuse

    def fuse(self: Any, softmax: Any, readers: Any, writers: Any) -> None:
        total = writers.get(softmax.input[0])
        if total is None or total.op_type != "Add":
            original(self, softmax, readers, writers)
            return
        product, mask = _terms(total, writers)
        if product is None:
            return
        before, nodes = softmax.input[0], len(self.nodes_to_add)
        softmax.input[0] = product
        original(self, softmax, readers, writers)
        made = [node for node in self.nodes_to_add[nodes:] if node.op_type == "MultiHeadAttention"]
        if not made:
            softmax.input[0] = before
        for node in made:
            node.input.extend([""] * (_BIAS - len(node.input)) + [mask])

    with patched(fusion, fuse=fuse):
        yield


def _terms(total: Any, writers: Any) -> tuple[str | None, str]:
    """The scores that an Add reads, which a MatMul gives, and the other term; None where neither is a MatMul's."""
    for one, other in (total.input, reversed(total.input)):
        writer = writers.get(one)
        if writer is not None and writer.op_type == "MatMul":
            return one, other
    return None, ""
