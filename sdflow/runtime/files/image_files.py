"""Open image files named on the command line, rejecting invalid ones and decompression bombs."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.input_file import open_input
from sdflow.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

RUN = frozenset({"EPS"})
"""Formats that Pillow decodes with an external program."""
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
"""Exceptions that Pillow raises for invalid files."""


def open_image(path: Path) -> Image:
    """Open an image file as RGB. Raises UsageError for invalid images, and for decompression bombs (Pillow's pixel
    limit)."""
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
