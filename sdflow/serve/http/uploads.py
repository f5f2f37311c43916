"""Images that a request brings along: looked at before they are unpacked. For ControlNets and
IP-Adapters, and as references, they come in base64; the files of an edit may be references too."""

from __future__ import annotations

import binascii
import io
import warnings
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import Fields
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.jobs import ConditioningImages, ControlImage, Image, ImagePrompt
from sdflow.serve.limits import Limits

FORMATS = ("PNG", "JPEG", "WEBP")


def read_upload(content: bytes, param: str, limits: Limits) -> Image:
    """The first frame of an image file, as RGBA where it has transparent pixels, else as RGB.

    Raises ApiError for what is no image of these formats, is damaged, or has too many pixels.
    """
    from PIL import ImageOps

    with opened_image(content, param) as opened:
        if opened.width * opened.height > limits.sent_pixels:
            size = f"{opened.width}x{opened.height}"
            raise ApiError(400, f"the image has {size} pixels, more than {limits.sent_pixels} in all.", param=param)
        turned = ImageOps.exif_transpose(opened)
        made = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
        if made.mode == "RGBA" and made.getchannel("A").getextrema()[0] == 255:
            made = made.convert("RGB")  # a browser's canvas writes alpha where nothing is transparent
    return Image(made.mode, made.size, made.tobytes())


@contextmanager
def opened_image(content: bytes, param: str) -> Iterator[Any]:
    """The image file, as PIL opens it. Raises ApiError for one that cannot be read."""
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            yield PIL.Image.open(io.BytesIO(content), formats=FORMATS)
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


def read_base64(text: str, param: str, limits: Limits) -> Image:
    """The image of a file in base64. Raises ApiError."""
    return read_upload(decoded(text, param), param, limits)


def decoded(text: str, param: str) -> bytes:
    """What is in base64, with or without `data:image/png;base64,` before it. Raises ApiError."""
    head, comma, rest = text.partition(",")
    encoded = rest if comma and head.startswith("data:") else text
    try:
        return b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"is no base64: {error}", param=param, code="invalid_image") from error


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


def start_and_references(
    fields: Fields, model: ServedModel, images: Sequence[Image], mask: Image | None
) -> tuple[Image | None, tuple[Image, ...]]:
    """Of the image files of an edit, the one to start from and those that are references: without mask and strength, all are.
    Raises ApiError for several images where the pipeline takes one."""
    if model.references and mask is None and getattr(fields, "strength", None) is None:
        return None, tuple(images)
    if len(images) > 1 and not model.references:
        raise ApiError(400, f"there are {len(images)} of image, and may be one.", param="image")
    return (images[0] if images else None), tuple(images[1:])


def read_conditioning_images(
    fields: Fields, model: ServedModel, limits: Limits, references: tuple[Image, ...] = ()
) -> ConditioningImages:
    """What a request brings along. references: that came as files. Raises ApiError for what is no image, and for what this
    pipeline has no use for."""
    _require_references(fields, model, limits, len(references) + len(fields.references))
    limits.require_at_most("control", len(fields.control), limits.conditioning_images)
    limits.require_at_most("image_prompts", len(fields.image_prompts), limits.conditioning_images)
    names = [each.name for each in fields.control]
    for name in names:
        if name not in model.nets:
            there = f"only {', '.join(model.nets)}" if model.nets else "it was built without any"
            raise ApiError(400, f"{model.name} has no ControlNet {name!r}: {there}.", param="control")
        if names.count(name) > 1:
            raise ApiError(400, f"the ControlNet {name} has two images.", param="control")
    for each in fields.control:
        if each.start >= each.end:
            raise ApiError(400, f"{each.name} ends at {each.end:g}, before it begins.", param="control")
    _require_fitting(fields, model)
    return ConditioningImages(
        tuple(
            ControlImage(each.name, _read(each.image, "control", limits), each.scale, each.start, each.end)
            for each in fields.control
        ),
        tuple(
            ImagePrompt(_read(each.image, "image_prompts", limits), each.scale, number)
            for number, each in zip(_adapters(fields, model), fields.image_prompts, strict=True)
        ),
        (*references, *(_read(each, "references", limits) for each in fields.references)),
    )


def _require_references(fields: Fields, model: ServedModel, limits: Limits, count: int) -> None:
    param = "references" if fields.references else "image"
    if count and not model.references:
        raise ApiError(400, f"{model.name} takes no reference images.", param=param)
    limits.require_at_most(param, count, min(model.references, limits.conditioning_images))


def _require_fitting(fields: Fields, model: ServedModel) -> None:
    shown, param = fields.image_prompts, "image_prompts"
    if not shown:
        return
    if not model.adapters:
        raise ApiError(400, f"{model.name} has no IP-Adapter.", param=param)
    if model.adapters > 1 and len(shown) != model.adapters:
        raise ApiError(400, f"there are {len(shown)} images for {model.adapters} IP-Adapters.", param=param)
    if model.adapters == 1 and len({each.scale for each in shown}) > 1:
        raise ApiError(400, "the images of one IP-Adapter have one scale.", param=param)


def _adapters(fields: Fields, model: ServedModel) -> range | list[int]:
    """Which adapter each image is for: with one all are its, with several there is one for each."""
    return [0] * len(fields.image_prompts) if model.adapters <= 1 else range(model.adapters)


def _read(text: str, param: str, limits: Limits) -> Image:
    return as_rgb(read_base64(text, param, limits))
