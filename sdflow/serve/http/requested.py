"""Convert requests to jobs, one per image, within the limits of the server and the features of the pipeline."""

from __future__ import annotations

import random
import uuid

from sdflow.errors import UsageError
from sdflow.families.settings import ALL, FAMILY_ARGUMENTS, MOST_SEED, Settings
from sdflow.families.shared.sampler_names import known_scheduler, require_installed
from sdflow.families.shared.schedulers import SAMPLERS, parts_of
from sdflow.prompts.weights import BREAK
from sdflow.prompts.wildcards import Wildcards
from sdflow.runtime.files.folder import folder_family
from sdflow.serve.api_error import invalid
from sdflow.serve.http.openai_fields import Fields
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.jobs import ConditioningImages, Image, Job, LoraFile
from sdflow.serve.limits import Limits, read_size

NOTHING = ConditioningImages()


def jobs_of(
    fields: Fields,
    model: ServedModel,
    limits: Limits,
    most_pixels: int | None,
    image: Image | None,
    mask: Image | None,
    loras: tuple[LoraFile, ...] = (),
    conditioning: ConditioningImages = NOTHING,
    wildcards: Wildcards | None = None,
) -> list[Job]:
    """Return the jobs of a request. most_pixels: per image. image, mask: start image and mask. loras, conditioning:
    resolved from the fields. wildcards: available to prompts.

    Raises ApiError for an invalid request.
    """
    images, previews = fields.n or 1, fields.partial_images or 0
    limits.require_at_most("n", images, limits.images)
    settings = fields.settings()
    scheduler, wanted = settings.scheduler, settings.steps
    limits.require_at_most("steps", wanted, limits.steps)
    runs = 1 if scheduler is None else SAMPLERS[parts_of(scheduler)[0]].runs
    if wanted is not None and wanted * runs > limits.steps:
        words = f"{wanted} steps of {scheduler} take {wanted * runs} denoiser runs"
        raise invalid("steps", f"{words}; the maximum is {limits.steps}.")
    limits.require_at_most("partial_images", previews, limits.previews)
    for param, value in {"prompt": fields.prompt, **settings.given()}.items():
        if isinstance(value, str):
            limits.require_at_most(param, len(value), limits.prompt, "characters")
    limits.require_at_most("loras", len(loras), limits.loras)
    _require_start(model, image, mask)
    _require_settings(settings, model, image, mask)
    size = _size(fields, model, limits, most_pixels, image, conditioning)
    arguments = {**settings.call_arguments(), **size}
    negative = arguments.pop("negative_prompt", None)
    defaults, side = model.defaults["inpaint" if mask else "image" if image else "text"], model.latents.image_size
    strength = arguments.get("strength", defaults.strength)
    steps = max(1, round(runs * (wanted or defaults.steps) * strength))
    pixels = arguments.get("height", side) * arguments.get("width", side)
    first = random.SystemRandom().randrange(2**32) if settings.seed is None else settings.seed
    request = uuid.uuid4().hex

    def resolved(param: str, text: str | None, seed: int) -> str | None:
        if wildcards is None or text is None:
            return text
        try:
            found = wildcards.resolve(text, seed)
        except UsageError as error:
            raise invalid(param, f"{error.where}: {error.what}.") from error
        limits.require_at_most(param, len(found), limits.prompt, "characters")
        return found

    jobs = [
        Job(
            request,
            index,
            model.name,
            resolved("prompt", fields.prompt, seed) or "",
            seed,
            resolved("negative_prompt", negative, seed),
            arguments,
            image,
            mask,
            scheduler,
            loras,
            previews if fields.stream else 0,
            (fields.output_format or "png").upper(),
            90 if fields.output_compression is None else max(1, fields.output_compression),
            conditioning,
            steps,
            pixels,
        )
        for index, seed in enumerate((first + index) % (MOST_SEED + 1) for index in range(images))
    ]
    # Each section between BREAKs is at least one chunk; the worker also counts tokens.
    texts = [text for job in jobs for text in (job.prompt, job.negative_prompt or "")]
    chunks = max(len(BREAK.split(text)) for text in texts) if settings.prompt_syntax == "a1111" else 1
    limits.require_cost(images, steps, pixels, chunks)
    return jobs


def _require_settings(settings: Settings, model: ServedModel, image: Image | None, mask: Image | None) -> None:
    """Raise ApiError for settings that have no effect with this pipeline or without an image."""
    if settings.scheduler is not None:
        try:
            require_installed(known_scheduler(settings.scheduler, schedulers=model.schedulers))
        except UsageError as error:
            raise invalid("scheduler", f"{model.name}: {error.what}. {error.remedy}") from error
    there = {"image": image, "mask": mask}
    for name in settings.given():
        if name in FAMILY_ARGUMENTS and name not in model.arguments:
            raise invalid(name, f"{model.name} does not support {name}.")
        needs = ALL[name].needs
        if needs is not None and there[needs] is None:
            raise invalid(name, f"{name} has no effect without {needs}; send one too.")
    if settings.mask_blur and settings.whole:
        raise invalid("mask_blur", "mask_blur has no effect with whole, which keeps nothing of the image.")


def _require_start(model: ServedModel, image: Image | None, mask: Image | None) -> None:
    if image is not None and not model.from_images:
        raise invalid("image", f"{model.name} has no encoder, so it cannot start from an image.")
    if model.task == "inpaint" and mask is None:
        raise invalid("mask", f"{model.name} is an inpainting pipeline; send an image and a mask to /v1/images/edits.")
    if model.task == "image" and image is None:
        raise invalid("image", f"{model.name} is an image-to-image pipeline; send an image to /v1/images/edits.")
    if model.manifest.origin.refiner is not None and mask is not None:
        raise invalid("mask", f"{model.name} has a refiner, which does not support masks.")


def _size(
    fields: Fields,
    model: ServedModel,
    limits: Limits,
    most: int | None,
    image: Image | None,
    conditioning: ConditioningImages,
) -> dict[str, int]:
    """Return the height and width arguments. The default is the size of the start image, else of the first ControlNet
    image, else the size at which the first reference is read; empty if there are none."""
    wanted, multiple = read_size(fields.size), model.latents.granularity
    if wanted is None:
        references = folder_family(model.folder).references
        if start := image or next((each.image for each in conditioning.controls), None):
            width, height = start.size
        elif references is not None and conditioning.references:
            height, width = references.size(*conditioning.references[0].size, multiple)
        else:
            return {}
        wanted = max(multiple, height - height % multiple), max(multiple, width - width % multiple)
    limits.require_size(*wanted, multiple, most)
    return {"height": wanted[0], "width": wanted[1]}
