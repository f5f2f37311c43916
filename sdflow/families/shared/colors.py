"""Latents to RGB without a VAE, as linear combinations of the channels."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[float, float, float]


@dataclass(frozen=True)
class LatentColors:
    """Linear map from a latent pixel to a color in [0, 1]. factors: each channel's contribution to red, green and blue.
    offset: color of zeros.

    The latents are in the denoiser's scale.
    """

    factors: tuple[Row, ...]
    offset: Row


def _halved(*rows: Row) -> tuple[Row, ...]:
    """Convert factors for pixel values in [-1, 1]."""
    return tuple((red / 2, green / 2, blue / 2) for red, green, blue in rows)


def _of_bytes(red: tuple[int, ...], green: tuple[int, ...], blue: tuple[int, ...]) -> tuple[Row, ...]:
    """Convert factors for pixel values of 0 to 255, one tuple per color."""
    return tuple((one / 255, two / 255, three / 255) for one, two, three in zip(red, green, blue, strict=True))


STABLE_DIFFUSION = LatentColors(
    _halved((0.298, 0.207, 0.208), (0.187, 0.286, 0.173), (-0.158, 0.189, 0.264), (-0.184, -0.271, -0.473)),
    (0.5, 0.5, 0.5),
)
"""Fitted by keturn for version 1.4: https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204/2.
Versions 1 and 2 have the same latents."""

STABLE_DIFFUSION_XL = LatentColors(
    _of_bytes((60, -60, 25, -70), (60, -5, 15, -50), (60, 10, -5, -35)), (150 / 255, 140 / 255, 130 / 255)
)
"""By Timothy Alexis Vass, https://huggingface.co/blog/TimothyAlexisVass/explaining-the-sdxl-latent-space, as in diffusers'
manual: https://huggingface.co/docs/diffusers/using-diffusers/callback."""
