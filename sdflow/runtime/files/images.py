"""Images: arrays to PIL images, and PNG files that say how they were made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.atomic_write import replacing
from sdflow.errors import VerificationError
from sdflow.families.image_text import CHUNKS, SETTINGS, image_text

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo

SETTINGS_CHUNK = SETTINGS


def to_pil(images: torch.Tensor) -> list[Image]:
    """PIL images from float NHWC in [0, 1]; they are rounded where they are."""
    return pil_of(rounded(images).cpu())


def rounded(images: torch.Tensor) -> torch.Tensor:
    """Pixels as bytes, from float in [0, 1]."""
    import torch

    return (images * 255).round().to(torch.uint8)


def pil_of(pixels: torch.Tensor) -> list[Image]:
    """PIL images from bytes, NHWC, in the processor's memory."""
    from PIL import Image

    return [Image.fromarray(image) for image in pixels.numpy()]


def unfinite(values: torch.Tensor) -> torch.Tensor:
    """How many are NaN or infinite, where the values are: nothing waits for it."""
    return (~values.isfinite()).sum()


def require_finite(count: int, of: int, submodel: str) -> None:
    """Raises VerificationError when so many of the values that a submodel gave for an image are NaN or infinite: it would be
    drawn black."""
    if count:
        raise VerificationError(
            f"there is no image: {count:,} of the {of:,} values that the {submodel} gave are NaN or infinite",
            remedy="`sdflow verify` finds where they come from; where float16 is too narrow, with --fix also what to do.",
        )


def write_png(image: Image, path: Path, settings: Mapping[str, Any]) -> None:
    """A PNG file with the settings in its text (`sdflow.families.image_text`); replaced in one step."""
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=png_text(image_text(settings)))


def png_text(chunks: Mapping[str, Any]) -> PngInfo:
    """The chunks of a text, for PIL. What is not ASCII is UTF-8: ComfyUI does not read Latin-1, which PIL prefers."""
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    for keyword in CHUNKS:
        content = chunks.get(keyword)
        if isinstance(content, str):
            add = text.add_text if content.isascii() and keyword != SETTINGS else text.add_itxt
            add(keyword, content)
    return text
