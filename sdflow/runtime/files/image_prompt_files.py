"""`--ip-image FILE[:SCALE]`: image prompts as files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.digest import digest_file
from sdflow.errors import UsageError

_SCALED = re.compile(r"(.+?):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", re.DOTALL)
OPTION = "--ip-image"


@dataclass(frozen=True)
class ImagePromptFile:
    """An image for an IP-Adapter. scale: how much it counts; None: it is not said."""

    path: Path
    scale: float | None = None

    def settings(self) -> dict[str, Any]:
        """As an image's file tells it."""
        return {"name": self.path.name, "sha256": digest_file(self.path), "scale": self.scale}


def parse_image_prompt(text: str) -> ImagePromptFile:
    """A file whose name has a number at its end is found first. Raises UsageError for an empty text."""
    if not text:
        raise UsageError("it names no file", where=OPTION, remedy="Write FILE or FILE:SCALE, as style.png:0.6.")
    scaled = None if Path(text).exists() else _SCALED.fullmatch(text)
    return ImagePromptFile(Path(scaled[1]), float(scaled[2])) if scaled else ImagePromptFile(Path(text))


def for_adapters(files: Sequence[ImagePromptFile], adapters: int, read: Callable[[Path], Any]) -> dict[str, Any]:
    """The arguments of a call. With one adapter all images are its; with several there is one for each, in their order.

    Raises UsageError for files that do not fit the adapters, and for two scales of one adapter.
    """
    if not files:
        return {}
    if not adapters:
        raise UsageError(
            "the pipeline has no IP-Adapter", where=OPTION, remedy="Name one under `ip_adapters` and build."
        )
    if adapters > 1 and len(files) != adapters:
        raise UsageError(
            f"{len(files)} images for {adapters} IP-Adapters",
            where=OPTION,
            remedy="Give one for each, in the order of the workflow's `ip_adapters`; FILE:0 leaves one out.",
        )
    for each in files:
        if each.scale is not None and not math.isfinite(each.scale):
            raise UsageError(
                f"{each.scale} is no scale", where=OPTION, remedy="It is between 0 and 1, or a little more."
            )
    images = [read(each.path) for each in files]
    if adapters > 1:
        return {"ip_adapter_image": images, "ip_adapter_scale": [_scale(each.scale) for each in files]}
    scales = {each.scale for each in files if each.scale is not None}
    if len(scales) > 1:
        raise UsageError(
            "the images of one IP-Adapter have one scale", where=OPTION, remedy="Write it behind one of them."
        )
    return {"ip_adapter_image": [images], "ip_adapter_scale": _scale(next(iter(scales), None))}


def _scale(said: float | None) -> float:
    return 1.0 if said is None else said
