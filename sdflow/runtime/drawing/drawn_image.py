"""A PIL image that writes its text into PNG files. Importing this needs pillow."""

from __future__ import annotations

from typing import Any

from PIL import Image

from sdflow.runtime.files.images import png_text


class DrawnImage(Image.Image):  # type: ignore[misc]  # its types are not read
    """What `Pipeline` gives: how it was drawn is in `info` (`sdflow.families.image_text`), and `save` writes it."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: A002
        """As PIL's. pnginfo: another text."""
        params.setdefault("pnginfo", png_text(self.info))
        super().save(fp, format, **params)
