"""Quantize weights blockwise again, in torch, from the definition in `sdflow.weights.blockwise`.

This shares no code with the recipes. Every step is a single IEEE 754 operation, and sums follow the order of the
definition, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from sdflow.weights.blockwise import Format

RANGES = (1.0, 0.94, 0.88, 0.82, 0.76)
AT_ONCE = 1 << 17
"""Values per chunk, each computed by one thread: they stay in the processor's cache, and no operation waits for another
one's threads."""


@contextmanager
def one_thread() -> Iterator[int]:
    """Limit torch to one thread per operation; yields the previous number.

    The setting is global to the process, so concurrent threads must not change it.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def blocks_again(exact: NDArray[Any], how: Format, threads: int) -> dict[str, NDArray[Any]]:
    """Float32 values (N, K) -> the bits of `values`, `scales` and `zeros`, as unsigned integers.

    threads: number of concurrent workers, each on its own rows; torch must be limited to one thread (`one_thread`).
    """
    import torch

    step = max(1, AT_ONCE // exact.shape[1])
    cut = [torch.from_numpy(exact[begin : begin + step]) for begin in range(0, len(exact), step)]
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda rows: _rows(rows.unflatten(1, (-1, how.size)), how), cut))
    values, scales, zeros = (torch.cat(part) for part in zip(*found, strict=True))
    bits = {torch.float32: torch.uint32}.get(scales.dtype, torch.uint16)
    return {"values": values.numpy(), "scales": scales.view(bits).numpy(), "zeros": zeros.numpy()}


def _rows(blocks: torch.Tensor, how: Format) -> Sequence[torch.Tensor]:
    """Return values, scales and zeros of weights (N, blocks, size)."""
    import torch

    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale, zero = _from_range(low, high, how)
    if how.algorithm == "mse":
        scale, zero = _nearest_range(blocks, low, high, scale, zero, how)
    tiny = torch.finfo(torch.float32).tiny
    stored = torch.where(scale.abs() < tiny, torch.zeros_like(scale), scale).to(getattr(torch, how.scale))
    numbers = _stored_numbers(blocks, stored.float(), zero, how)
    values = numbers.to(torch.uint8)
    zeros = zero.to(torch.uint8)
    if how.bits == 4:
        values = values[..., 0::2] + 16 * values[..., 1::2]
        if zeros.shape[1] % 2:
            zeros = torch.nn.functional.pad(zeros, (0, 1), value=8)
        zeros = zeros[..., 0::2] + 16 * zeros[..., 1::2]
    return values.contiguous(), stored.contiguous(), zeros.contiguous()


def _from_range(low: torch.Tensor, high: torch.Tensor, how: Format) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if how.symmetric:
        middle = 2 ** (how.bits - 1)
        return torch.where(-low >= high, low, high) / -float(middle), torch.full_like(low, middle)
    top = 2**how.bits - 1
    scale = (high - low) / float(top)
    zero = torch.where(scale == 0, torch.zeros_like(scale), -low / scale)
    return scale, torch.floor(zero.clamp(0, top).double() + 0.5).float()


def _stored_numbers(blocks: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, how: Format) -> torch.Tensor:
    """Round to nearest, halves up, in float64, where adding 0.5 is exact."""
    import torch

    per_scale = torch.where(scale == 0, torch.zeros_like(scale), torch.ones_like(scale) / scale)
    place = blocks * per_scale[..., None] + zero[..., None]
    return torch.floor(place.clamp(0, 2**how.bits - 1).double() + 0.5).float()


def _nearest_range(
    blocks: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, how: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range with the smallest squared error (the first of equal ones), with the scale that best fits its
    numbers."""
    import torch

    tried = [(scale, zero)]
    for share in RANGES[1:]:
        part = torch.tensor(share, dtype=torch.float32)
        tried.append(_from_range(low * part, high * part, how))
    errors = torch.stack([_squares(blocks, *each, how) for each in tried])
    best = errors.argmin(0)
    for index, (other_scale, other_zero) in enumerate(tried):
        scale = torch.where(best == index, other_scale, scale)
        zero = torch.where(best == index, other_zero, zero)
    steps = _stored_numbers(blocks, scale, zero, how) - zero[..., None]
    weight = _sum_of_halves(steps * steps)
    return torch.where(weight > 0, _sum_of_halves(steps * blocks) / weight, scale), zero


def _squares(blocks: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, how: Format) -> torch.Tensor:
    off = (_stored_numbers(blocks, scale, zero, how) - zero[..., None]) * scale[..., None] - blocks
    return _sum_of_halves(off * off)


def _sum_of_halves(values: torch.Tensor) -> torch.Tensor:
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first + second
    return values.squeeze(-1)
