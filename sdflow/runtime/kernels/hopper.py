"""Whether the GPU supports sdflow's Hopper, float8 and bfloat16 kernels."""

from __future__ import annotations

HOPPER = "90"
"""Compute capability of Hopper, whose kernels (geglu.cu, float8_product.cu) are compiled for sm_90a only."""

FLOAT8_SINCE = (8, 9)
"""First compute capability with float8 products."""
BFLOAT16_SINCE = (8, 0)
"""First compute capability with bfloat16."""


def has_float8() -> bool:
    """Whether the GPU supports float8 products."""
    return _capability() >= FLOAT8_SINCE


def has_bfloat16() -> bool:
    """Whether the GPU computes in bfloat16."""
    return _capability() >= BFLOAT16_SINCE


def on_hopper() -> bool:
    """Whether the GPU has Hopper's compute capability."""
    return "".join(map(str, _capability())) == HOPPER


def _capability() -> tuple[int, int]:
    """Return the current GPU's compute capability, (0, 0) without one."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(device.major), int(device.minor)
