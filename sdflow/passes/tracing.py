"""Preparation of a module for the TorchScript exporter, and patches of the exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdflow.models.base import Model
from sdflow.processes.patched import patched


def traced_module(model: Model, module: Any) -> Any:
    """Prepare `module` in place so that `forward` matches `model.ports`; return it in eval mode, without gradients."""
    model.traced(module)
    return module.eval().requires_grad_(False)


@contextmanager
def weights_kept_apart() -> Iterator[None]:
    """While active, `torch.onnx.export(dynamo=False)` gives every parameter an initializer named by its state_dict key.

    By default the exporter (torch/onnx/_internal/torchscript_exporter/utils.py) folds the transpose before a MatMul and
    the unsqueeze after a GroupNorm into new initializers with generated names, and merges initializers of equal values.
    The mapping to parameters is then lost, and the graph depends on weights that happen to be equal. Constants are
    still folded; `weight_names.fold_weights` folds the weights afterwards and records each step.
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
