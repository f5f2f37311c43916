"""A PIL image that writes its settings into PNG files. Importing this requires pillow."""

from __future__ import annotations

from typing import Any

from PIL import Image

from sdflow.runtime.files.images import png_text


class DrawnImage(Image.Image):  # type: ignore[misc]  # its types are not read
    """Image returned by `Pipeline`. `info` holds its settings (`sdflow.runtime.files.image_text`), which `save` writes."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: A002
        """Like PIL's `save`. pnginfo: replaces the text."""
        params.setdefault("pnginfo", png_text(self.info))
        super().save(fp, format, **params)
