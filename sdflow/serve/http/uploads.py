"""Images in requests, checked before they are decoded. Images for ControlNets and IP-Adapters are base64-encoded;
references are too, or files of an edit."""

from __future__ import annotations

import binascii
import io
import warnings
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sdflow.serve.api_error import invalid
from sdflow.serve.http.openai_fields import Fields
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.jobs import ConditioningImages, ControlImage, Image, ImagePrompt
from sdflow.serve.limits import Limits

FORMATS = ("PNG", "JPEG", "WEBP")


def read_upload(content: bytes, param: str, limits: Limits) -> Image:
    """Decode the first frame of an image file, as RGBA if it has transparent pixels, otherwise as RGB.

    Raises ApiError if the file has another format, is damaged, or has too many pixels.
    """
    from PIL import ImageOps

    with opened_image(content, param) as opened:
        if opened.width * opened.height > limits.sent_pixels:
            size = f"{opened.width}x{opened.height}"
            raise invalid(param, f"the image is {size}, more than {limits.sent_pixels} pixels.")
        turned = ImageOps.exif_transpose(opened)
        made = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
        if made.mode == "RGBA" and made.getchannel("A").getextrema()[0] == 255:
            made = made.convert("RGB")  # browsers' canvases write an alpha channel even if nothing is transparent
    return plain(made)


@contextmanager
def opened_image(content: bytes, param: str) -> Iterator[Any]:
    """Open an image file with PIL. Raises ApiError for an unreadable one."""
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            yield PIL.Image.open(io.BytesIO(content), formats=FORMATS)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError, Warning) as error:
        # The message of UnidentifiedImageError contains the buffer's address.
        why = "" if isinstance(error, PIL.UnidentifiedImageError) else f": {error}"
        words = f"not a readable image ({', '.join(FORMATS)}){why}"
        raise invalid(param, words, code="invalid_image") from error


def read_base64(text: str, param: str, limits: Limits) -> Image:
    """Decode a base64-encoded image file. Raises ApiError."""
    return read_upload(decoded(text, param), param, limits)


def decoded(text: str, param: str) -> bytes:
    """Decode base64, with or without a `data:image/png;base64,` prefix. Raises ApiError."""
    head, comma, rest = text.partition(",")
    encoded = rest if comma and head.startswith("data:") else text
    try:
        return b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(param, f"not valid base64: {error}", code="invalid_image") from error


def as_pil(image: Image) -> Any:
    import PIL.Image

    return PIL.Image.frombytes(image.mode, image.size, image.pixels)


def plain(opened: Any) -> Image:
    return Image(opened.mode, opened.size, opened.tobytes())


def as_mask(image: Image) -> Image:
    """Return a mask, white where to inpaint: where RGBA is transparent, as in OpenAI's API, or the image is white."""
    from PIL import ImageOps

    opened = as_pil(image)
    return plain(ImageOps.invert(opened.getchannel("A")) if image.mode == "RGBA" else opened.convert("L"))


def as_rgb(image: Image) -> Image:
    """Drop transparency, keeping the colors beneath it."""
    return image if image.mode == "RGB" else plain(as_pil(image).convert("RGB"))


def start_and_references(
    fields: Fields, model: ServedModel, images: Sequence[Image], mask: Image | None
) -> tuple[Image | None, tuple[Image, ...]]:
    """Split the images of an edit into a start image and references. If the pipeline takes references and there is
    neither a mask nor a strength, all are references. Raises ApiError for several images if the pipeline takes one."""
    if model.references and mask is None and getattr(fields, "strength", None) is None:
        return None, tuple(images)
    if len(images) > 1 and not model.references:
        raise invalid("image", f"there are {len(images)} images; this pipeline takes one.")
    return (images[0] if images else None), tuple(images[1:])


def read_conditioning_images(
    fields: Fields, model: ServedModel, limits: Limits, references: tuple[Image, ...] = ()
) -> ConditioningImages:
    """Decode the images in a request's fields. references: those uploaded as files. Raises ApiError for an invalid
    image, and for images that the pipeline does not support."""
    count, param = len(references) + len(fields.references), "references" if fields.references else "image"
    if count and not model.references:
        raise invalid(param, f"{model.name} does not support reference images.")
    limits.require_at_most(param, count, min(model.references, limits.conditioning_images))
    _require_nets(fields, model, limits)
    shown, param = fields.image_prompts, "image_prompts"
    limits.require_at_most(param, len(shown), limits.conditioning_images)
    if shown and not model.adapters:
        raise invalid(param, f"{model.name} has no IP-Adapter.")
    if shown and model.adapters > 1 and len(shown) != model.adapters:
        raise invalid(param, f"there are {len(shown)} images for {model.adapters} IP-Adapters; send one for each.")
    if model.adapters == 1 and len({each.scale for each in shown}) > 1:
        raise invalid(param, "the images of one IP-Adapter must have the same scale.")

    def read(text: str, param: str) -> Image:
        return as_rgb(read_base64(text, param, limits))

    return ConditioningImages(
        tuple(
            ControlImage(each.name, read(each.image, "control"), each.scale, each.start, each.end)
            for each in fields.control
        ),
        tuple(  # all images for a single adapter, else one for each
            ImagePrompt(read(each.image, param), each.scale, number if model.adapters > 1 else 0)
            for number, each in enumerate(shown)
        ),
        (*references, *(read(each, "references") for each in fields.references)),
    )


def _require_nets(fields: Fields, model: ServedModel, limits: Limits) -> None:
    limits.require_at_most("control", len(fields.control), limits.conditioning_images)
    seen = set[str]()
    for each in fields.control:
        if each.name not in model.nets:
            there = ", ".join(model.nets) or "none"
            raise invalid("control", f"{model.name} has no ControlNet {each.name!r}; available: {there}.")
        if each.name in seen:
            raise invalid("control", f"there is more than one image for the ControlNet {each.name}.")
        if each.start >= each.end:
            raise invalid("control", f"{each.name}: end must be greater than start.")
        seen.add(each.name)
