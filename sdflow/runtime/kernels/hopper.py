"""Whether the GPU at hand is one of the generation that some of our kernels are for."""

from __future__ import annotations

HOPPER = "90"
"""Compiled with what this capability alone has (sm_90a): geglu.cu and float8_product.cu are there only."""


def on_hopper() -> bool:
    """Whether the GPU at hand is of the compute capability that the kernels of HOPPER are for."""
    import torch

    if not torch.cuda.is_available():
        return False
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{device.major}{device.minor}" == HOPPER
