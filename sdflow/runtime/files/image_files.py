"""Image files that are named on the command line: opened, or refused, as one that would fill the memory is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.input_file import open_input
from sdflow.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

RUN = frozenset({"EPS"})
"""Formats that Pillow hands over to another program."""
NO_IMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    struct.error,
)
"""What Pillow raises for files of its many formats."""


def open_image(path: Path) -> Image:
    """An image file, in RGB. Raises UsageError for what is none, and for one of more pixels than Pillow deems sane (a bomb)."""
    from PIL import Image

    Image.init()
    try:
        with (
            open_input(path) as stream,
            Image.open(stream, formats=[name for name in Image.ID if name not in RUN]) as opened,
        ):
            return opened.convert("RGB")
    except (*NO_IMAGE, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot be read as an image: {error}", where=str(path)) from error
