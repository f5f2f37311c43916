"""Inpainting like A1111's webui: filling the masked area, and generating only that part of an image at full size."""

from __future__ import annotations

import io
from dataclasses import dataclass

from sdflow.runtime.files.images import png_text
from sdflow.serve.http.uploads import as_pil, plain
from sdflow.serve.jobs import Image


def inverted(mask: Image) -> Image:
    from PIL import ImageOps

    return plain(ImageOps.invert(as_pil(mask)))


def filled(image: Image, mask: Image) -> Image:
    """Fill the masked area with the surrounding colors, blurred from far to near."""
    import PIL.Image
    from PIL import ImageFilter, ImageOps

    opened = as_pil(image)
    outside = PIL.Image.new("RGBa", opened.size)
    outside.paste(opened.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(as_pil(mask).resize(opened.size)))
    made = PIL.Image.new("RGBA", opened.size)
    for radius, times in ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1)):
        blurred = outside.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            made.alpha_composite(blurred)
    return plain(made.convert("RGB"))


@dataclass(frozen=True)
class Part:
    """The masked part of an image, which is generated alone and pasted back. box: left, top, right and bottom."""

    image: Image
    mask: Image
    box: tuple[int, int, int, int]
    blur: float

    @classmethod
    def of(cls, image: Image, mask: Image, width: int, height: int, padding: int, blur: float) -> Part:
        """Return the part around the mask's white plus padding, in the shape of width x height if the image allows."""
        opened = as_pil(mask).resize(image.size)
        left, top, right, bottom = opened.getbbox() or (0, 0, *image.size)
        across = _wider(left - padding, right + padding, (bottom - top + 2 * padding) * width / height, image.size[0])
        down = _wider(top - padding, bottom + padding, (across[1] - across[0]) * height / width, image.size[1])
        return cls(image, plain(opened), (across[0], down[0], across[1], down[1]), blur)

    def cut(self, width: int, height: int) -> tuple[Image, Image]:
        """Return the image and mask of the part, scaled to this size."""
        image, mask = (as_pil(each).crop(self.box).resize((width, height)) for each in (self.image, self.mask))
        return plain(image), plain(mask)

    def put_back(self, file: bytes) -> bytes:
        """Paste the generated PNG file into the whole image."""
        import PIL.Image
        from PIL import ImageFilter

        drawn, whole = PIL.Image.open(io.BytesIO(file)), as_pil(self.image)
        left, top, right, bottom = self.box
        mask = as_pil(self.mask).filter(ImageFilter.GaussianBlur(self.blur)).crop(self.box)
        whole.paste(drawn.resize((right - left, bottom - top)), (left, top), mask)
        made = io.BytesIO()
        whole.save(made, "PNG", pnginfo=png_text(drawn.info))
        return made.getvalue()


def _wider(low: int, high: int, length: float, limit: int) -> tuple[int, int]:
    """Extend an interval to at least this length, shifted to lie between 0 and the limit."""
    more = max(0, round(length) - (high - low))
    low, high = low - more // 2, high + more - more // 2
    if low < 0:
        low, high = 0, high - low
    if high > limit:
        low, high = low - (high - limit), limit
    return max(0, low), high
