"""Previews: what a drawing is becoming, while it is drawn.

    def show(preview: Preview) -> None:
        preview.images()[0].save(f"{preview.index}.png")

    pipeline(prompt, callback_on_preview=show)

After each step the model has said what noise is in the latents; without it they are what it takes the image for. A tiny VAE
decodes them at full size, where the pipeline has one. Else every latent pixel becomes one pixel, by a linear map from the
latents' channels to red, green and blue (`sdflow.families.shared.colors`): at an eighth of the size, for next to nothing.
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
    """What a drawing is after a step. index: of the step, from 0. total: how many there are.

    latents: (images, channels, rows, columns), on the device, without the noise that is still in them. kept: what a mask keeps,
    put over them. Nothing is decoded before `images` is called: a preview that nobody looks at costs next to nothing.
    """

    index: int
    total: int
    latents: torch.Tensor
    draw: Draw
    kept: Kept | None = None

    def images(self) -> list[Image]:
        """One for each image that is drawn. It waits for the step on the device; call it in the callback or later, but on the
        thread that draws: a session is not shared."""
        drawn = self.draw(self.latents)
        return to_pil(drawn if self.kept is None else self.kept.resized(*drawn.shape[1:3]).over(drawn))


def previewer(family: Family, decoder: Submodel, what: Latents) -> Draw:
    """What draws the previews of a pipeline: its own decoder, if that is a quick one, else the linear map."""
    if decoder.part.model.quick:
        return lambda latents: by_decoder(latents, decoder, what)
    if (colors := family.colors) is not None:
        return lambda latents: by_colors(latents, colors)
    return lambda latents: by_decoder(_shrunk(latents), decoder, what)


def previewer_of(folder: Path, family: Family, what: Latents, target: Target) -> Draw:
    """The tiny VAE of a pipeline folder, as what draws the previews of another pipeline, of this family and with these latents.

    Raises UsageError for a folder that has none, and for one of other latents.
    """
    theirs = folder_family(folder)
    decoder = load_submodel(folder, theirs.decoder, target, lazy=True)
    where = str(folder / theirs.decoder)
    if not decoder.part.model.quick:
        raise UsageError(
            f"it is of class {decoder.part.model.class_name}, too slow for previews",
            where=where,
            remedy="Take a pipeline that was built with TAESD for its VAE.",
        )
    own = folder_latents(folder)  # a tiny VAE's are the denoiser's themselves, not times a factor
    if theirs.colors != family.colors or own.channels != what.channels:
        raise UsageError(
            f"it decodes the latents of {theirs.title}, not those of {family.title}",
            where=where,
            remedy="Take TAESD for Stable Diffusion 1 and 2, TAESDXL for XL.",
        )
    return lambda latents: by_decoder(latents, decoder, own)


def by_colors(latents: torch.Tensor, colors: LatentColors) -> torch.Tensor:
    """A pixel for each of the latents."""
    factors = latents.new_tensor(colors.factors)  # (channels, 3)
    return (latents.permute(0, 2, 3, 1) @ factors + latents.new_tensor(colors.offset)).clamp(0, 1)


SHRUNK = 16
"""Rows or columns, the larger of both, of latents that a preview's decoder is given where nobody has published their colors."""


def _shrunk(latents: torch.Tensor) -> torch.Tensor:
    import torch

    by = -(-max(latents.shape[2:]) // SHRUNK)
    return latents if by == 1 else torch.nn.functional.avg_pool2d(latents, by, ceil_mode=True)


def by_decoder(latents: torch.Tensor, decoder: Submodel, what: Latents) -> torch.Tensor:
    """As a VAE decodes them."""
    import torch

    return torch.cat(
        [
            (image.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)  # good until the next is decoded
            for image in decode(decoder, latents, what)
        ]
    )
