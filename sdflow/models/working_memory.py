"""Estimates of a network's working memory from its config: layer widths times measured factors.

Measured with ONNX Runtime 1.31.1 on the CPU in float32: growth of the process's peak memory during a session's first
run (including unused arena memory), in tensors of each resolution's width. Estimates are 1.0 to 1.5 times the measured
values (tests/runtime/test_memory_limit.py repeats the measurement).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdflow.models.base import Config

UNET_TENSORS = 40
"""The feed-forward layer of a transformer block alone needs 16: 8 for its projection, 4 for each half."""

VAE_TENSORS = 5

VAE_SCORES = 2
"""Scores and their softmax: a VAE's attention is not fused."""


def unet_values(config: Config, rows: int, columns: int, *, scores: bool) -> int:
    """Estimate the values of a UNet, or of its first half in a ControlNet, per row of the batch."""
    widths, kinds = config["block_out_channels"], config["down_block_types"]
    heads = _per_level(config.get("num_attention_heads") or config.get("attention_head_dim") or 8, len(widths))
    found, most_scores = 0, 0
    for level, (width, kind) in enumerate(zip(widths, kinds, strict=True)):
        pixels = rows * columns >> 2 * level
        found = max(found, UNET_TENSORS * width * pixels)
        if "Attn" in kind or level == len(widths) - 1:  # includes the middle block
            most_scores = max(most_scores, heads[level] * pixels**2)
    return found + (most_scores if scores else 0)


def full_size_channels(config: Config) -> int:
    """Return the widest channels at full image size in a VAE decoder: its last level receives those of the previous
    one."""
    return int(max(config["block_out_channels"][:2]))


def block_channels(config: Config) -> int:
    """Return the channels at full image size of a VAE block's input, its shortcut, and its inner value together, the most
    of all blocks."""
    halves = [config[name] for name in ("block_out_channels", "decoder_block_out_channels") if config.get(name)]
    return max(int(max(widths[:2]) + 2 * widths[0]) for widths in halves)


def vae_values(config: Config, widths: Sequence[int], rows: int, columns: int) -> int:
    """Estimate the values of one half of a VAE, per image. widths: by level, the one with the most pixels first."""
    pixels = rows * columns << 2 * (len(widths) - 1)
    wider = [
        max(pair) for pair in zip(widths, (*widths[1:], 0), strict=True)
    ]  # a level starts with the next one's output
    found = max(VAE_TENSORS * width * (pixels >> 2 * level) for level, width in enumerate(wider))
    attends = config.get("mid_block_add_attention", True)
    return max(found, VAE_SCORES * (rows * columns) ** 2 + VAE_TENSORS * widths[-1] * rows * columns if attends else 0)


def _per_level(value: Any, levels: int) -> Sequence[int]:
    return [value] * levels if isinstance(value, int) else value
