"""Whether the GPU at hand is one of the generation that some of our kernels are for."""

from __future__ import annotations

HOPPER = "90"
"""Compiled with what this capability alone has (sm_90a): geglu.cu and float8_product.cu are there only."""


FLOAT8_SINCE = (8, 9)
"""The first compute capability with products of float8."""


def has_float8() -> bool:
    """Whether the GPU at hand has products of float8."""
    import torch

    if not torch.cuda.is_available():
        return False
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (device.major, device.minor) >= FLOAT8_SINCE


def on_hopper() -> bool:
    """Whether the GPU at hand is of the compute capability that the kernels of HOPPER are for."""
    import torch

    if not torch.cuda.is_available():
        return False
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{device.major}{device.minor}" == HOPPER
