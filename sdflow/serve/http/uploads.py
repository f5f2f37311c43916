"""Images that a request brings along: looked at before they are unpacked."""

from __future__ import annotations

import binascii
import io
import warnings
from base64 import b64decode

from sdflow.serve.api_error import ApiError
from sdflow.serve.jobs import Image
from sdflow.serve.limits import Limits

FORMATS = ("PNG", "JPEG", "WEBP")


def read_upload(content: bytes, param: str, limits: Limits) -> Image:
    """The first frame of an image file, as RGBA where it has transparent pixels, else as RGB.

    Raises ApiError for what is no image of these formats, is damaged, or has too many pixels.
    """
    import PIL.Image
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            opened = PIL.Image.open(io.BytesIO(content), formats=FORMATS)
            if opened.width * opened.height > limits.sent_pixels:
                size = f"{opened.width}x{opened.height}"
                raise ApiError(400, f"the image has {size} pixels, more than {limits.sent_pixels} in all.", param=param)
            turned = ImageOps.exif_transpose(opened)
            made = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
            if made.mode == "RGBA" and made.getchannel("A").getextrema()[0] == 255:
                made = made.convert("RGB")  # a browser's canvas writes alpha where nothing is transparent
    except (
        OSError,
        ValueError,
        SyntaxError,
        PIL.Image.DecompressionBombError,
        PIL.Image.DecompressionBombWarning,
    ) as error:
        why = (
            "" if isinstance(error, PIL.UnidentifiedImageError) else f": {error}"
        )  # its words name the buffer's address
        raise ApiError(
            400, f"cannot be read as an image of {', '.join(FORMATS)}{why}", param=param, code="invalid_image"
        ) from error
    return Image(made.mode, made.size, made.tobytes())


def read_base64(text: str, param: str, limits: Limits) -> Image:
    """The same of an image in base64, with or without `data:image/png;base64,` before it."""
    head, comma, rest = text.partition(",")
    encoded = rest if comma and head.startswith("data:") else text
    try:
        content = b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"is no base64: {error}", param=param, code="invalid_image") from error
    return read_upload(content, param, limits)


def as_mask(image: Image) -> Image:
    """White where it is to be drawn. Of an image with transparent pixels these are drawn, as in OpenAI's API; else the white."""
    import PIL.Image
    from PIL import ImageOps

    opened = PIL.Image.frombytes(image.mode, image.size, image.pixels)
    mask = ImageOps.invert(opened.getchannel("A")) if image.mode == "RGBA" else opened.convert("L")
    return Image("L", mask.size, mask.tobytes())


def as_rgb(image: Image) -> Image:
    """Without its transparency: the colours that lie beneath."""
    import PIL.Image

    if image.mode == "RGB":
        return image
    opened = PIL.Image.frombytes(image.mode, image.size, image.pixels).convert("RGB")
    return Image("RGB", opened.size, opened.tobytes())
