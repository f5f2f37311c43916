"""Convert arrays to PIL images, and write PNG files with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.atomic_write import replacing
from sdflow.errors import VerificationError
from sdflow.runtime.files.image_text import CHUNKS, SETTINGS, image_text

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo


def to_pil(images: torch.Tensor) -> list[Image]:
    """Convert float values in [0, 1], (images, height, width, 3), to PIL images; rounding happens on the tensor's device."""
    return pil_of(rounded(images).cpu())


def rounded(images: torch.Tensor) -> torch.Tensor:
    """Convert float in [0, 1] to bytes."""
    import torch

    return (images * 255).round().to(torch.uint8)


def pil_of(pixels: torch.Tensor) -> list[Image]:
    """Convert NHWC bytes in host memory to PIL images."""
    from PIL import Image

    return [Image.fromarray(image) for image in pixels.numpy()]


def unfinite(values: torch.Tensor) -> torch.Tensor:
    """Count NaN and infinite values, on the values' device, without synchronization."""
    return (~values.isfinite()).sum()


def require_finite(count: int, of: int, submodel: str) -> None:
    """Raise VerificationError if any of a submodel's `of` values for an image are NaN or infinite; the image would be
    black."""
    if count:
        raise VerificationError(
            f"no image: {count:,} of {of:,} output values of the {submodel} are NaN or infinite",
            remedy="`sdflow verify` finds their origin; if float16's range is too small, `--fix` suggests a remedy.",
        )


def write_png(image: Image, path: Path, settings: Mapping[str, Any]) -> None:
    """Atomically write a PNG file with the settings in its text (`sdflow.runtime.files.image_text`)."""
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=png_text(image_text(settings)))


def png_text(chunks: Mapping[str, Any]) -> PngInfo:
    """Return PNG text chunks for PIL. Non-ASCII text is UTF-8: ComfyUI cannot read Latin-1, PIL's default."""
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    for keyword in CHUNKS:
        content = chunks.get(keyword)
        if isinstance(content, str):
            add = text.add_text if content.isascii() and keyword != SETTINGS else text.add_itxt
            add(keyword, content)
    return text
