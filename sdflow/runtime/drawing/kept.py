"""Put the kept area of the start image back over an inpainted image.

The VAE changes all pixels, including those that a mask keeps; diffusers' pipelines leave them changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.families.settings import MOST_BLUR

if TYPE_CHECKING:
    import torch

EXTENT = 2.5
"""Reach of a soft edge to either side of the mask's edge in standard deviations, as in AUTOMATIC1111's webui."""


def require_blur(
    blur: float, mask: bool, whole: bool, names: tuple[str, ...] = ("mask_blur", "mask_image", "whole")
) -> None:
    """Raise UsageError for an invalid mask blur. names: the arguments' names for the user."""
    own, mask_name, whole_name = names
    if not 0 <= blur <= MOST_BLUR:
        raise UsageError(f"invalid value {blur:g}", where=own, remedy=f"Use 0 to {MOST_BLUR} pixels.")
    if blur and not mask:
        raise UsageError("there is no mask to blur", where=own, remedy=f"Add {mask_name}.")
    if blur and whole:
        raise UsageError(
            f"with {whole_name} nothing is kept, so there is no edge to blur", where=own, remedy="Use only one of them."
        )


@dataclass(frozen=True)
class Kept:
    """The area of the start image that a mask keeps.

    pixels: of the start image, float32 (images, height, width, 3) in [0, 1]. drawn: weight of the generated pixels,
    float32 (masks, height, width, 1) in [0, 1]; 0 keeps the original. Fewer images and masks than generated images are
    repeated in order.
    """

    pixels: torch.Tensor
    drawn: torch.Tensor

    @classmethod
    def of(cls, image: torch.Tensor, mask: torch.Tensor, blur: float, device: str) -> Kept:
        """image: (images, 3, height, width) in [-1, 1]. mask: (masks, 1, height, width), 1 where to draw. blur:
        standard deviation of a Gaussian blur of the mask, in pixels."""
        import torch

        soft = blurred(mask.to(device, torch.float32), blur)
        pixels = (image.to(device, torch.float32) / 2 + 0.5).clamp(0, 1)
        return cls(pixels.permute(0, 2, 3, 1), soft.permute(0, 2, 3, 1))

    def over(self, images: torch.Tensor) -> torch.Tensor:
        """Blend the kept area over images, float32 (images, height, width, 3); fully kept pixels equal the start
        image's exactly."""
        import torch

        count = len(images)
        drawn = self.drawn.repeat(count // len(self.drawn), 1, 1, 1)
        pixels = self.pixels.repeat(count // len(self.pixels), 1, 1, 1)
        return torch.where(drawn > 0, pixels + (images - pixels) * drawn, pixels)

    def resized(self, height: int, width: int) -> Kept:
        """Resize for images of another size, such as previews."""
        if self.pixels.shape[1:3] == (height, width):
            return self
        return replace(self, pixels=_resized(self.pixels, height, width), drawn=_resized(self.drawn, height, width))


def blurred(mask: torch.Tensor, deviation: float) -> torch.Tensor:
    """Apply a Gaussian blur to a mask (masks, 1, height, width), replicating its borders."""
    import torch
    from torch.nn.functional import conv2d, pad

    reach = math.ceil(EXTENT * deviation)
    if not reach:
        return mask
    places = torch.arange(-reach, reach + 1, device=mask.device, dtype=torch.float32)
    weights = torch.exp(-((places / deviation) ** 2) / 2)
    weights = weights / weights.sum()
    rows = conv2d(pad(mask, (0, 0, reach, reach), mode="replicate"), weights.view(1, 1, -1, 1))
    both = conv2d(pad(rows, (reach, reach, 0, 0), mode="replicate"), weights.view(1, 1, 1, -1))
    return both.clamp(0, 1)


def _resized(values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    import torch

    channels_first = values.permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(channels_first, size=(height, width), mode="area")
    return small.permute(0, 2, 3, 1)
