"""Image prompts: what a call says of them, as diffusers' pipelines take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.image_prompts import ImagePrompt

_IMAGE, _SCALE = "ip_adapter_image", "ip_adapter_scale"


def image_prompts(images: Any, scale: float | Sequence[float], adapters: int) -> list[ImagePrompt]:
    """A prompt for each adapter. images: one for each, or a list of several; None: none, and the image is drawn as without it.
    scale: of all, or one for each. Raises UsageError for what means nothing, and for images without adapters."""
    if images is None:
        return [ImagePrompt()] * adapters
    if not adapters:
        raise UsageError(
            "the pipeline has no IP-Adapter", where=_IMAGE, remedy="Name one under `ip_adapters` and build."
        )
    given = images if isinstance(images, list) else [images]
    if len(given) != adapters:
        several = "Several images for one adapter are a list in the list: [[first, second]]."
        raise UsageError(f"{len(given)} images for {adapters} IP-Adapters", where=_IMAGE, remedy=several)
    scales = list(scale) if isinstance(scale, Sequence) else [scale] * adapters
    if len(scales) != adapters:
        raise UsageError(
            f"{len(scales)} scales for {adapters} IP-Adapters",
            where=_SCALE,
            remedy="Give one for all, or one for each.",
        )
    for each in scales:
        if isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each):
            raise UsageError(
                f"{each!r} is no scale", where=_SCALE, remedy="It is a number between 0 and 1, or a little more."
            )
    listed = [[] if each is None else each if isinstance(each, list) else [each] for each in given]
    for each in (image for found in listed for image in found):
        if not hasattr(each, "mode") and not hasattr(each, "shape"):
            raise UsageError(f"{each!r:.40} is no image", where=_IMAGE, remedy="Give PIL images, arrays or tensors.")
    return [ImagePrompt(tuple(each), float(factor)) for each, factor in zip(listed, scales, strict=True)]
