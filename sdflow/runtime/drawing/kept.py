"""What a mask keeps of the image to start from: its own pixels, put over what was drawn.

All of an image comes out of the VAE, which changes what was only to be kept, too. diffusers' pipelines leave it so.
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
"""How many standard deviations a soft edge reaches to either side of the mask's, as in AUTOMATIC1111's webui."""


def require_blur(
    blur: float, mask: bool, whole: bool, names: tuple[str, ...] = ("mask_blur", "mask_image", "whole")
) -> None:
    """Raises UsageError for a soft edge that there cannot be. names: of the arguments, as the user calls them."""
    own, mask_name, whole_name = names
    if not 0 <= blur <= MOST_BLUR:
        raise UsageError(f"it is {blur:g}", where=own, remedy=f"Give pixels, from 0 to {MOST_BLUR}.")
    if blur and not mask:
        raise UsageError("there is no mask whose edge could be soft", where=own, remedy=f"Add {mask_name}.")
    if blur and whole:
        raise UsageError(
            f"with {whole_name} nothing is kept, so there is no edge", where=own, remedy="Leave one of them out."
        )


@dataclass(frozen=True)
class Kept:
    """pixels: of the image, float32 (images, height, width, 3) in [0, 1]. drawn: how much of each pixel is drawn, float32
    (masks, height, width, 1) in [0, 1]; 0 keeps it. There may be fewer images and masks than images are drawn, which repeat
    them in order."""

    pixels: torch.Tensor
    drawn: torch.Tensor

    @classmethod
    def of(cls, image: torch.Tensor, mask: torch.Tensor, blur: float, device: str) -> Kept:
        """image: (images, 3, height, width) in [-1, 1]. mask: (masks, 1, height, width), 1 where something is drawn. blur: the
        standard deviation of a Gauss filter over the mask, in pixels."""
        import torch

        soft = blurred(mask.to(device, torch.float32), blur)
        pixels = (image.to(device, torch.float32) / 2 + 0.5).clamp(0, 1)
        return cls(pixels.permute(0, 2, 3, 1), soft.permute(0, 2, 3, 1))

    def over(self, images: torch.Tensor) -> torch.Tensor:
        """Images, float32 (images, height, width, 3), with what is kept put over them; where a pixel is kept in full, it is
        exactly that of the image to start from."""
        import torch

        count = len(images)
        drawn = self.drawn.repeat(count // len(self.drawn), 1, 1, 1)
        pixels = self.pixels.repeat(count // len(self.pixels), 1, 1, 1)
        return torch.where(drawn > 0, pixels + (images - pixels) * drawn, pixels)

    def resized(self, height: int, width: int) -> Kept:
        """For images of another size: previews."""
        if self.pixels.shape[1:3] == (height, width):
            return self
        return replace(self, pixels=_resized(self.pixels, height, width), drawn=_resized(self.drawn, height, width))


def blurred(mask: torch.Tensor, deviation: float) -> torch.Tensor:
    """A mask (masks, 1, height, width) through a Gauss filter; beyond its borders it goes on as it ends there."""
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
