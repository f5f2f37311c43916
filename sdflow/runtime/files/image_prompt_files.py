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
    """An image for an IP-Adapter. scale: None if not given."""

    path: Path
    scale: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings to record in an image's file."""
        return {"name": self.path.name, "sha256": digest_file(self.path), "scale": self.scale}


def parse_image_prompt(text: str) -> ImagePromptFile:
    """Parse the option. An existing file whose name ends in a number takes precedence. Raises UsageError if empty."""
    if not text:
        raise UsageError(
            "it does not name a file", where=OPTION, remedy="Write FILE or FILE:SCALE, such as style.png:0.6."
        )
    scaled = None if Path(text).exists() else _SCALED.fullmatch(text)
    return ImagePromptFile(Path(scaled[1]), float(scaled[2])) if scaled else ImagePromptFile(Path(text))


def for_adapters(files: Sequence[ImagePromptFile], adapters: int, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Return the arguments of a call. A single adapter gets all images; several adapters get one each, in order.

    Raises UsageError if the files do not fit the adapters, or one adapter has two scales.
    """
    if not files:
        return {}
    if not adapters:
        raise UsageError(
            "the pipeline has no IP-Adapter",
            where=OPTION,
            remedy="Name one under `ip_adapters` in the workflow, and rebuild.",
        )
    if adapters > 1 and len(files) != adapters:
        raise UsageError(
            f"{len(files)} images for {adapters} IP-Adapters",
            where=OPTION,
            remedy="Pass one per adapter, in the order of the workflow's `ip_adapters`; FILE:0 disables one.",
        )
    for each in files:
        if each.scale is not None and not math.isfinite(each.scale):
            raise UsageError(
                f"{each.scale} is not a valid scale",
                where=OPTION,
                remedy="Use a number between 0 and 1, or slightly more.",
            )
    images = [read(each.path) for each in files]
    if adapters > 1:
        return {"ip_adapter_image": images, "ip_adapter_scale": [_scale(each.scale) for each in files]}
    scales = {each.scale for each in files if each.scale is not None}
    if len(scales) > 1:
        raise UsageError(
            "the images of one IP-Adapter share one scale", where=OPTION, remedy="Write the scale after one of them."
        )
    return {"ip_adapter_image": [images], "ip_adapter_scale": _scale(next(iter(scales), None))}


def _scale(said: float | None) -> float:
    return 1.0 if said is None else said
