"""PyTorch's own float8 products, as reference and yardstick for sdflow's.

A Linear like torchao's with PerRow scales (float8 dynamic activations and weights): E4M3 weights with a scale per
output channel, inputs quantized per row at run time, and torch._scaled_mm, which uses cuBLASLt. Shares no code with
sdflow.
"""

from __future__ import annotations

import re

import torch

LARGEST = 448.0
SMALLEST = 1 << 20
OTHERS = re.compile(r"time|modulation|norm|embedder|adaLN")
"""Names of layers that stay in 16 bits: embeddings, and what depends on the timestep alone."""


class Float8Linear(torch.nn.Module):
    """A Linear in float8; its result has the type of what comes in, or bfloat16 where that is all that the product gives."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        values, scales = rows(linear.weight.detach().float())
        self.register_buffer("values", values)
        self.register_buffer("scales", scales.reshape(1, -1))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        values, scales = rows(flat)
        if x.is_cuda:
            y = torch._scaled_mm(
                values, self.values.t(), scales, self.scales, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        else:
            y = (values.float() @ self.values.float().t() * scales * self.scales).to(torch.bfloat16)
        y = y.to(x.dtype).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 and its scales (rows, 1): the largest magnitude of a row becomes 448."""
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def quantize(module: torch.nn.Module) -> int:
    """Put Float8Linear in the place of the large Linears, in place; how many."""
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and layer.in_features * layer.out_features >= SMALLEST
        and not OTHERS.search(name)
    ]
    for name, layer in found:
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, Float8Linear(layer))
    return len(found)
