"""Default image and mask inputs, for verification and timing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def canvas(task: str, height: int, width: int) -> dict[str, Any]:
    """Return the inputs of a task (`Task` in `sdflow.families.shared.defaults`) besides the prompt, by argument;
    deterministic. The image has gradients and waves in three colours; the mask is white in the middle.
    """
    if task == "text":
        return {}
    given = {"image": _waves(height, width), "strength": 1.0}
    return given if task == "image" else {**given, "mask_image": _middle(height, width)}


def shown(adapters: int) -> dict[str, Any]:
    """Return image prompts for this many IP-Adapters, by the call's argument; empty without any. Deterministic."""
    return {"ip_adapter_image": [_waves(96, 144)] * adapters} if adapters else {}


def references(count: int, height: int, width: int) -> list[Image]:
    """Return reference images of this size, at least 64 pixels a side. Deterministic."""
    return [_waves(max(64, height), max(64, width)).rotate(180 * (number % 2)) for number in range(count)]


def _waves(height: int, width: int) -> Image:
    import numpy as np
    from PIL import Image

    rows, columns = np.meshgrid(np.arange(height) / height, np.arange(width) / width, indexing="ij")
    colours = (rows, columns, 0.5 + 0.5 * np.sin(12 * rows) * np.cos(9 * columns))
    return Image.fromarray((np.stack(colours, axis=-1) * 255).astype("uint8"))


def _middle(height: int, width: int) -> Image:
    from PIL import Image

    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (width // 4, height // 4, width - width // 4, height - height // 4))
    return mask
