"""Properties of a pipeline's latents, from the configs of its denoiser and VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.models.base import Config, halved

MOST_LATENTS = 1 << 14
"""Largest accepted `sample_size`, in latent pixels (131,072 image pixels at a scale of 8)."""


@dataclass(frozen=True)
class Latents:
    """Properties of a pipeline's latents.

    channels: of the VAE. scale: image pixels per latent pixel, along each axis. multiple: rows and columns must be multiples
    of this. (PyTorch's UNet also accepts sizes that do not halve evenly; a traced graph does not.) size: rows and columns at
    the model's native size. factor, shift: latents = (VAE latents - shift) * factor. patch: latent pixels per image token,
    along each axis.
    """

    channels: int
    scale: int
    multiple: int
    size: int
    factor: float
    shift: float = 0.0
    patch: int = 1

    @property
    def granularity(self) -> int:
        """Image height and width must be multiples of this many pixels."""
        return self.scale * self.multiple

    @property
    def image_size(self) -> int:
        """Native image height and width, in pixels."""
        return self.scale * self.size

    def tokens(self, rows: int, columns: int) -> int:
        """Number of image tokens for latents of this size."""
        return (rows // self.patch) * (columns // self.patch)

    def to_vae(self, latents: Any) -> Any:
        """Latents as the decoder takes them. Tensors or arrays of any shape."""
        scaled = latents / self.factor
        return scaled + self.shift if self.shift else scaled

    def from_vae(self, encoded: Any) -> Any:
        """Latents from the encoder's output."""
        return (encoded - self.shift if self.shift else encoded) * self.factor

    @classmethod
    def of(cls, denoiser: Config, vae: Config, *, multiple: int, patch: int = 1, where: str = "unet") -> Latents:
        """From the config.json of a denoiser and a VAE. where: the denoiser's folder, for messages. Raises KeyError or
        TypeError for an incomplete config, CheckpointError for an invalid size."""
        return cls(
            channels=int(vae["latent_channels"]),
            scale=halved(vae),
            multiple=multiple,
            size=_side(denoiser["sample_size"], where),
            factor=float(vae.get("scaling_factor", 0.18215)),
            shift=float(vae.get("shift_factor") or 0.0),
            patch=patch,
        )


def _side(sample_size: Any, where: str) -> int:
    """Return the side from diffusers' forms: one number, or a pair of height and width."""
    sides = set(sample_size) if isinstance(sample_size, list | tuple) and len(sample_size) == 2 else {sample_size}
    side = sides.pop() if len(sides) == 1 else None
    if type(side) is not int or not 0 < side <= MOST_LATENTS:
        raise CheckpointError(
            f"its sample_size is {sample_size!r:.40}",
            where=f"{where}/config.json",
            remedy=f"Set the number of latent rows, 1 to {MOST_LATENTS}, which must equal the columns.",
        )
    return side
