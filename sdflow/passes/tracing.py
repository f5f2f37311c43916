"""What the TorchScript exporter is given, and what it must leave alone meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdflow.models.base import Model
from sdflow.processes.patched import patched


def traced_module(model: Model, module: Any) -> Any:
    """Change `module` so that its `forward` takes and returns the tensors of `model.ports`; return it, without gradients."""
    model.traced(module)
    return module.eval().requires_grad_(False)


@contextmanager
def weights_kept_apart() -> Iterator[None]:
    """While this is open, `torch.onnx.export(dynamo=False)` gives every parameter an initializer named by its key.

    Left to itself, the exporter (torch/onnx/_internal/torchscript_exporter/utils.py) folds the transpose before a
    MatMul and the unsqueeze after a GroupNorm into new initializers with made-up names, and merges initializers of
    equal values. Then nobody knows any more which is which, and the graph depends on coincidences among the weights.
    Constants are still folded; `weight_names.fold_weights` folds the weights afterwards and records what it did.
    """
    import torch

    fold = torch._C._jit_pass_onnx_constant_fold

    def fold_constants_only(graph: Any, params: dict[str, Any], opset: int) -> dict[str, Any]:
        return {**params, **fold(graph, {}, opset)}

    def merge_nothing(graph: Any, params: dict[str, Any], training: bool) -> dict[str, Any]:
        return params

    mended = {
        "_jit_pass_onnx_constant_fold": fold_constants_only,
        "_jit_pass_onnx_deduplicate_initializers": merge_nothing,
    }
    with patched(torch._C, **mended):
        yield
