"""Previews of a drawing in progress.

    def show(preview: Preview) -> None:
        preview.images()[0].save(f"{preview.index}.png")

    pipeline(prompt, callback_on_preview=show)

After each step, the latents without the predicted noise are the model's current estimate of the image. A tiny VAE
decodes them at full size, if the pipeline has one. Otherwise a linear map from latent channels to RGB
(`sdflow.families.shared.colors`) gives one pixel per latent pixel, at almost no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.families.shared.colors import LatentColors
from sdflow.families.shared.latents import Latents
from sdflow.runtime.drawing.kept import Kept
from sdflow.runtime.files.folder import folder_family, folder_latents, load_submodel
from sdflow.runtime.files.images import to_pil
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.vae import decode
from sdflow.targets import Target

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Draw = Callable[["torch.Tensor"], "torch.Tensor"]
"""Latents (images, channels, rows, columns) to images, float32 NHWC in [0, 1]."""


@dataclass(frozen=True)
class Preview:
    """State of a drawing after a step. index: of the step, from 0. total: number of steps.

    latents: (images, channels, rows, columns), on the device, without the remaining noise. kept: area that a mask
    keeps, blended over them. Decoding happens in `images`, so unused previews cost almost nothing.
    """

    index: int
    total: int
    latents: torch.Tensor
    draw: Draw
    kept: Kept | None = None

    def images(self) -> list[Image]:
        """Return one image per generated image. Waits for the step on the device; call it in the callback or later, but
        on the drawing's thread: sessions are not shared."""
        drawn = self.draw(self.latents)
        return to_pil(drawn if self.kept is None else self.kept.resized(*drawn.shape[1:3]).over(drawn))


def previewer(family: Family, decoder: Submodel, what: Latents) -> Draw:
    """Return the preview function of a pipeline: its own decoder if that is fast, else the linear map."""
    if decoder.part.model.quick:
        return lambda latents: by_decoder(latents, decoder, what)
    if (colors := family.colors) is not None:
        return lambda latents: by_colors(latents, colors)
    return lambda latents: by_decoder(_shrunk(latents), decoder, what)


def previewer_of(folder: Path, family: Family, what: Latents, target: Target) -> Draw:
    """Return a preview function that uses a pipeline folder's tiny VAE, for another pipeline of this family and
    latents.

    Raises UsageError if the folder has no tiny VAE, or one for other latents.
    """
    theirs = folder_family(folder)
    decoder = load_submodel(folder, theirs.decoder, target, lazy=True)
    where = str(folder / theirs.decoder)
    if not decoder.part.model.quick:
        raise UsageError(
            f"it is of class {decoder.part.model.class_name}, too slow for previews",
            where=where,
            remedy="Use a pipeline built with TAESD as its VAE.",
        )
    own = folder_latents(folder)  # a tiny VAE does not scale its latents
    if theirs.colors != family.colors or own.channels != what.channels:
        raise UsageError(
            f"it decodes the latents of {theirs.title}, not those of {family.title}",
            where=where,
            remedy="Use TAESD for Stable Diffusion 1 and 2, TAESDXL for XL.",
        )
    return lambda latents: by_decoder(latents, decoder, own)


def by_colors(latents: torch.Tensor, colors: LatentColors) -> torch.Tensor:
    """Map latents (images, channels, rows, columns) to RGB in [0, 1], (images, rows, columns, 3)."""
    factors = latents.new_tensor(colors.factors)  # (channels, 3)
    return (latents.permute(0, 2, 3, 1) @ factors + latents.new_tensor(colors.offset)).clamp(0, 1)


SHRUNK = 16
"""Maximum rows and columns of latents to decode for a preview, for families without published colors."""


def _shrunk(latents: torch.Tensor) -> torch.Tensor:
    import torch

    by = -(-max(latents.shape[2:]) // SHRUNK)
    return latents if by == 1 else torch.nn.functional.avg_pool2d(latents, by, ceil_mode=True)


def by_decoder(latents: torch.Tensor, decoder: Submodel, what: Latents) -> torch.Tensor:
    """Decode the latents with a VAE."""
    import torch

    _, decoded = decode(decoder, latents, what)  # an image is only valid until the next is decoded
    return torch.cat([(image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1) for image in decoded])
