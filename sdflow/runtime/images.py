"""Images: arrays to PIL images, and PNG files that say how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.atomic_write import replacing
from sdflow.errors import VerificationError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

SETTINGS_CHUNK = "sdflow"


def to_pil(images: torch.Tensor) -> list[Image]:
    """PIL images from float NHWC in [0, 1]; they are rounded where they are."""
    import torch
    from PIL import Image

    return [Image.fromarray(image) for image in (images * 255).round().to(torch.uint8).cpu().numpy()]


def require_finite(values: torch.Tensor, submodel: str) -> None:
    """Raises VerificationError when what a submodel gave for an image holds NaN or infinities: it would be drawn black."""
    if not bool(values.isfinite().all()):
        count = int((~values.isfinite()).sum())
        raise VerificationError(
            f"there is no image: {count:,} of the {values.numel():,} values that the {submodel} gave are NaN or infinite",
            remedy="`sdflow verify` finds where they come from; where float16 is too narrow, with --fix also what to do.",
        )


def write_png(image: Image, path: Path, settings: Mapping[str, Any]) -> None:
    """A PNG file with the settings as JSON in a text chunk named `sdflow`; replaced in one step."""
    from PIL.PngImagePlugin import PngInfo

    chunk = PngInfo()
    chunk.add_itxt(SETTINGS_CHUNK, json.dumps(settings, ensure_ascii=False, sort_keys=True))
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=chunk)
