"""Run PyTorch in 16 bits by definition: every operator computes in float32 and rounds once to float16 or bfloat16.

GPUs do this. torch's own half kernels on a CPU depend on the processor and the build of torch, and without fp16
instructions those for convolutions and matrix products take 25 to 60 times as long as float32's (measured on AVX2).
Attention and linear layers are intercepted when modules call them: torch decomposes them depending on its build, and
each part would round. A convolution's bias is added separately, to the rounded result, as PyTorch does on a GPU
(aten/src/ATen/native/Convolution.cpp, ConvBackend::Cudnn).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

AS_THEY_ARE = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "clone", "copy", "detach", "_to_copy", "cat", "stack", "repeat", "repeat_interleave", "flip", "roll",
    "embedding", "index", "index_select", "gather", "where", "masked_fill", "fill", "zero",
    "constant_pad_nd", "upsample_nearest2d", "_unsafe_view", "_reshape_copy", "split_with_sizes_copy", "tril", "triu",
    "argmax", "eq", "ne", "lt", "le", "gt", "ge", "any", "all", "isnan", "isinf", "isfinite", "_local_scalar_dense",
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_empty", "new_full", "new_ones",
})  # fmt: skip
"""Operators of torch.ops.aten with the same result either way, which run directly: those that move or compare numbers,
and + - x / of two, whose half kernels round the exact result."""

KEPT = 4 * 10**9
"""Limit in bytes for widened weights kept between uses. Others are widened at each use: in float32 a large module takes
twice the memory of its halves."""


@contextmanager
def quick_halves(*modules: torch.nn.Module, known: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Iterator[None]:
    """Make operators on halves compute in float32 and round their results to halves.

    modules: in half precision; up to KEPT, their weights are widened once, not at each use. Changing a weight meanwhile
    must give it new memory (as `Module.to` does); the old one is kept until the end. known: further widened weights, by
    the address of their halves; entries may come and go.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter, tree_map

    kinds = (torch.float16, torch.bfloat16)
    weights = {
        weight.data_ptr(): weight.detach()
        for module in modules
        for weight in module.parameters()
        if weight.dtype in kinds and weight.is_contiguous()
    }
    wide: dict[int, torch.Tensor] = {}
    kept = 0

    def widened(value: Any) -> Any:
        nonlocal kept
        if not is_half(value):
            return value
        at = value.data_ptr()
        if at in known and value.numel() == known[at].numel():
            return known[at].as_strided(value.shape, value.stride())
        if at not in weights or value.numel() != weights[at].numel():
            return value.float()
        if at not in wide:
            if kept + 4 * value.numel() > KEPT:
                return value.float()
            wide[at] = weights[at].float()
            kept += 4 * value.numel()
        return wide[at].as_strided(value.shape, value.stride())

    def is_half(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in kinds

    def rounded(values: Any, kind: torch.dtype) -> Any:
        def half(value: Any) -> Any:
            return value.to(kind) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

        return tree_map(half, values)

    def kind_of(*operands: Any) -> torch.dtype:
        return next(value.dtype for value in tree_iter(operands) if is_half(value))

    def in_float32(function: Any, args: Any, kwargs: Any, kind: torch.dtype | None = None) -> Any:
        kind = kind or kind_of(args, kwargs)
        return rounded(function(*tree_map(widened, args), **tree_map(widened, kwargs)), kind)

    def gives_wider(function: Any, args: Any, kwargs: Any) -> bool:
        """Whether more than halves is requested: by the result's type, or by an operand of a wider one."""
        if kwargs.get("dtype") not in (None, *kinds):
            return True
        return torch.Tag.pointwise in function.tags and any(
            isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64) and value.dim() > 0
            for value in tree_iter((args, kwargs))
        )

    def written(function: Any, args: Any, kwargs: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The halves that an operator writes into, by id, with their float32 copies."""
        arguments = function._schema.arguments  # torch has no public API for an operator's mutated arguments
        given = {**dict(zip([each.name for each in arguments], args, strict=False)), **kwargs}
        into = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
        halves = [value for value in tree_iter([given.get(name) for name in into]) if is_half(value)]
        return {id(value): (value, value.float()) for value in halves}

    class Whole(TorchFunctionMode):  # type: ignore[misc]
        """Intercepts attention and linear layers before torch decomposes them."""

        functions = (torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.linear)

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in self.functions and is_half(args[0] if args else kwargs.get("query", kwargs.get("input"))):
                return in_float32(function, args, kwargs)
            return function(*args, **kwargs)

    class Halves(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = function.__name__.partition(".")[0]
            if function.is_view or name.removesuffix("_") in AS_THEY_ARE:
                return function(*args, **kwargs)
            if not any(is_half(value) for value in tree_iter((args, kwargs))):
                return function(*args, **kwargs)
            if (kind := kwargs.get("dtype")) in kinds:  # of the result, which is rounded to it
                return in_float32(function, args, {**kwargs, "dtype": torch.float32}, kind)
            if copies := written(function, args, kwargs):
                return self.into(copies, function, args, kwargs)
            if gives_wider(function, args, kwargs):
                return function(*tree_map(widened, args), **tree_map(widened, kwargs))
            bias = args[2] if name == "convolution" else None
            if bias is not None:
                args = (*args[:2], None, *args[3:])
            result = in_float32(function, args, kwargs)
            return result if bias is None else result.add_(bias.reshape(1, -1, *[1] * (result.dim() - 2)))

        def into(self, copies: Any, function: Any, args: Any, kwargs: Any) -> Any:
            """Write an operator's in-place results back into the halves, rounded, and return these instead of the
            copies."""

            def copied(value: Any) -> Any:
                return copies[id(value)][1] if id(value) in copies else widened(value)

            result = function(*tree_map(copied, args), **tree_map(copied, kwargs))
            for value, copy in copies.values():
                if value.shape != copy.shape:  # `out` takes the shape of the result
                    value.resize_(copy.shape)
                value.copy_(copy)
            mine, kind = {id(copy): value for value, copy in copies.values()}, kind_of(args, kwargs)
            return tree_map(lambda value: mine[id(value)] if id(value) in mine else rounded(value, kind), result)

    with torch.no_grad(), Whole(), Halves():
        yield
