"""Plain fp16 PyTorch on a CPU, at a usable speed.

The module is in half precision, and every operator takes and gives halves, as on a GPU. What differs is who computes
the few expensive ones. torch's own half kernels for convolutions and matrix products are 25 to 60 times slower than
those for float32 on a processor without fp16 instructions (measured on AVX2). So their operands are widened, the
float32 kernel computes and accumulates, and the result is rounded once: what a GPU's tensor cores do (torch's half
kernel for matrices is as far from the exact product, 2.08e-4). A convolution's bias is added in a second operation, to
the rounded result, as PyTorch does on a GPU (aten/src/ATen/native/Convolution.cpp, ConvBackend::Cudnn).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXPENSIVE = (
    "convolution", "linear", "addmm", "mm", "bmm", "baddbmm", "matmul",
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    "native_group_norm", "group_norm", "native_layer_norm", "layer_norm", "_softmax", "gelu", "silu",
)  # fmt: skip
"""Operators of torch.ops.aten that are computed in float32 and rounded."""

KEPT = 4 * 10**9
"""Bytes of widened weights that are kept from one use to the next. Beyond, they are widened at each use: twice the memory of
a large module in halves is its memory in float32."""


@contextmanager
def quick_halves(*modules: torch.nn.Module) -> Iterator[None]:
    """While this is open, expensive operators on halves compute in float32 and round their results to halves.

    modules: in half precision; their weights are widened once, not at each use, up to KEPT. Who changes one meanwhile gives
    it other memory (as `Module.to` does), and the old is kept until the end.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    weights = {
        weight.data_ptr(): weight.detach()
        for module in modules
        for weight in module.parameters()
        if weight.dtype == torch.float16 and weight.is_contiguous()
    }
    wide: dict[int, torch.Tensor] = {}
    kept = 0

    def widened(value: Any) -> Any:
        nonlocal kept
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float16:
            return value
        at = value.data_ptr()
        if at not in weights or value.numel() != weights[at].numel():
            return value.float()
        if at not in wide:
            if kept + 4 * value.numel() > KEPT:
                return value.float()
            wide[at] = weights[at].float()
            kept += 4 * value.numel()
        return wide[at].as_strided(value.shape, value.stride())

    def rounded(value: Any) -> Any:
        return value.half() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    class Halves(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = function.__name__.partition(".")[0]
            operands = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if name not in EXPENSIVE or not any(value.dtype == torch.float16 for value in operands):
                return function(*args, **kwargs)
            bias = args[2] if name == "convolution" else None
            if bias is not None:
                args = (*args[:2], None, *args[3:])
            result = tree_map(rounded, function(*tree_map(widened, args), **tree_map(widened, kwargs)))
            return result if bias is None else result.add_(bias.reshape(1, -1, *[1] * (result.dim() - 2)))

    with torch.no_grad(), Halves():
        yield
