"""Images beside the one to start from: for ControlNets, image prompts for IP-Adapters, and references. They come in base64; the
files of an edit may be references too."""

from __future__ import annotations

from collections.abc import Sequence

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import Fields
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.http.uploads import as_rgb, read_base64
from sdflow.serve.jobs import ConditioningImages, ControlImage, Image, ImagePrompt
from sdflow.serve.limits import Limits


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
