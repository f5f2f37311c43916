"""Image prompts of a call, in diffusers' form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.image_prompts import ImagePrompt

_IMAGE, _SCALE = "ip_adapter_image", "ip_adapter_scale"


def image_prompts(images: Any, scale: float | Sequence[float], adapters: int) -> list[ImagePrompt]:
    """Return a prompt for each adapter. images: one per adapter, or a list of several; None: no image prompts. scale:
    for all, or one each. Raises UsageError for invalid values, and for images without adapters."""
    if images is None:
        return [ImagePrompt()] * adapters
    if not adapters:
        raise UsageError(
            "the pipeline has no IP-Adapter",
            where=_IMAGE,
            remedy="Name one under `ip_adapters` in the workflow, and rebuild.",
        )
    given = images if isinstance(images, list) else [images]
    if len(given) != adapters:
        several = "Nest several images for one adapter: [[first, second]]."
        raise UsageError(f"{len(given)} images for {adapters} IP-Adapters", where=_IMAGE, remedy=several)
    scales = list(scale) if isinstance(scale, Sequence) else [scale] * adapters
    if len(scales) != adapters:
        raise UsageError(
            f"{len(scales)} scales for {adapters} IP-Adapters",
            where=_SCALE,
            remedy="Pass one for all, or one per adapter.",
        )
    for each in scales:
        if isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each):
            raise UsageError(
                f"{each!r} is not a valid scale", where=_SCALE, remedy="Use a number between 0 and 1, or slightly more."
            )
    listed = [[] if each is None else each if isinstance(each, list) else [each] for each in given]
    for each in (image for found in listed for image in found):
        if not hasattr(each, "mode") and not hasattr(each, "shape"):
            raise UsageError(
                f"{each!r:.40} is not an image", where=_IMAGE, remedy="Pass PIL images, arrays or tensors."
            )
    return [ImagePrompt(tuple(each), float(factor)) for each, factor in zip(listed, scales, strict=True)]
