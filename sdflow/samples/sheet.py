"""A contact sheet: images in a grid, with their prompts underneath."""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

GAP, LINE, LINES = 8, 12, 3


def sheet(
    images: Sequence[Image.Image], prompts: Sequence[str], columns: int = 4, title: str | None = None
) -> Image.Image:
    """Arrange images row by row on one RGB image; cells have the first image's size.

    Raises ValueError if images and prompts differ in number or are empty.
    """
    if not images:
        raise ValueError("a sheet needs at least one image")
    width, height = images[0].size
    font = ImageFont.load_default(size=10)
    top = LINE + 2 * GAP if title else 0
    rows = -(-len(images) // columns)
    cell = height + LINES * LINE + GAP
    page = Image.new("RGB", (columns * (width + GAP) + GAP, top + rows * cell + GAP), "white")
    pen = ImageDraw.Draw(page)
    if title:
        pen.text((GAP, GAP), title, fill="black", font=ImageFont.load_default(size=13))
    for index, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        x, y = GAP + index % columns * (width + GAP), top + GAP + index // columns * cell
        page.paste(image.convert("RGB").resize((width, height)), (x, y))
        letters = max(8, width // 5)
        for line, text in enumerate(textwrap.wrap(prompt, letters)[:LINES]):
            pen.text((x, y + height + 1 + line * LINE), text, fill="black", font=font)
    return page
