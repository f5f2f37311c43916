"""What a pipeline's latents are, by the configs of its denoiser and its VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.models.base import Config, halved

MOST_LATENTS = 1 << 14
"""Rows and columns of latents that a config may name as its model's own size: 131,072 pixels."""


@dataclass(frozen=True)
class Latents:
    """What a pipeline's latents are.

    channels: of the VAE. scale: image pixels per latent pixel, along each axis. multiple: rows and columns must be
    multiples of this: PyTorch's UNet also takes sizes that do not halve evenly, a traced graph doubles whatever it has
    halved. size: rows and columns of the model's own size. factor, shift: latents are (the VAE's - shift) * factor. patch: latent
    pixels per image token, along each axis.
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
        """Height and width of an image, in pixels, must be multiples of this."""
        return self.scale * self.multiple

    @property
    def image_size(self) -> int:
        """Height and width, in pixels, of the images that the model was made for."""
        return self.scale * self.size

    def tokens(self, rows: int, columns: int) -> int:
        """Image tokens of latents of this size."""
        return (rows // self.patch) * (columns // self.patch)

    def to_vae(self, latents: Any) -> Any:
        """What the decoder takes, of latents: tensors or arrays of any shape."""
        scaled = latents / self.factor
        return scaled + self.shift if self.shift else scaled

    def from_vae(self, encoded: Any) -> Any:
        """Latents, of what the encoder gave."""
        return (encoded - self.shift if self.shift else encoded) * self.factor

    @classmethod
    def of(cls, denoiser: Config, vae: Config, *, multiple: int, patch: int = 1, where: str = "unet") -> Latents:
        """From config.json of a denoiser and a VAE. where: the denoiser's folder, for messages. Raises KeyError or
        TypeError for one that lacks something, CheckpointError for a size that is none."""
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
    """diffusers takes one number, or two for height and width."""
    sides = set(sample_size) if isinstance(sample_size, list | tuple) and len(sample_size) == 2 else {sample_size}
    side = sides.pop() if len(sides) == 1 else None
    if type(side) is not int or not 0 < side <= MOST_LATENTS:
        raise CheckpointError(
            f"its sample_size is {sample_size!r:.40}",
            where=f"{where}/config.json",
            remedy=f"Write the rows of the latents, 1 to {MOST_LATENTS}; they are as many as the columns.",
        )
    return side
