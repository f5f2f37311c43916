"""MultiHeadAttention fusion with a mask for diffusion transformers; onnxruntime.transformers only matches it without
one.

`FusionMultiHeadAttentionMMDit` expects the product of queries and keys right before the Softmax. If a mask is added in
between, it gets the product instead, and the fused operator gets the mask as `attention_bias`, (batch, 1, queries,
keys).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sdflow.processes.patched import patched

_BIAS = 5
"""Index of MultiHeadAttention's `attention_bias` input; the inputs between it and the values are empty."""


@contextlib.contextmanager
def masked_attention() -> Iterator[None]:
    """While active, ORT's diffusion transformer fusions also fuse attentions with a mask."""
    from onnxruntime.transformers import optimizer  # noqa: F401  adds the folder of the fusions to sys.path

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
    """Return an Add's inputs as (scores, mask); the scores come from a MatMul and are None if no MatMul does."""
    for one, other in (total.input, reversed(total.input)):
        writer = writers.get(one)
        if writer is not None and writer.op_type == "MatMul":
            return one, other
    return None, ""
