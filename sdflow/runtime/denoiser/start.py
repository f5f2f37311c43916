"""Inputs of the first step: prompts, sizes, noise, image and mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.defaults import Task
from sdflow.machine.memory import available_bytes
from sdflow.models.vae import image_reader
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch


ALWAYS_THERE = 1 << 28
"""Sizes in bytes up to this are allocated without checking free memory."""


@dataclass(frozen=True)
class Start:
    """Terms of the latents, on the device, each of shape (images, channels, rows, columns).

    noise: standard normal. drawn: the noises that the scheduler draws, `Schedule.draws` of them. image: latents of the
    start image. mask: True where inpainting draws, one channel; None: everywhere. context: additional input channels of
    inpainting denoisers.
    """

    noise: torch.Tensor
    drawn: list[torch.Tensor]
    image: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    context: torch.Tensor | None = None


def require_start(task: Task, image: Any, mask: Any, names: tuple[str, str] = ("image", "mask_image")) -> None:
    """Raise UsageError if inputs that this task requires are missing. names: the arguments' names for the user."""
    if mask is not None and image is None:
        raise UsageError("a mask requires an image", where=_first_word(names[1]), remedy=f"Add {names[0]}.")
    missing = [name for name, given in zip(names, (image, mask), strict=True) if given is None]
    if task == "inpaint" and missing:
        raise UsageError(
            "this is an inpainting model: it requires an image and a mask, and generates the mask's white area",
            where=_first_word(missing[0]),
            remedy=f"Add {' and '.join(missing)}. For text to image, use an all-white mask.",
        )
    if task == "image" and image is None:
        raise UsageError("this model requires a start image", where=_first_word(names[0]), remedy=f"Add {names[0]}.")


def require_span(begin: float | None, end: float | None, image: Any, mask: Any) -> None:
    """Raise UsageError for invalid fractions of the denoising, and for a start without latents."""
    for name, place in (("denoising_start", begin), ("denoising_end", end)):
        if place is not None and not 0 < place < 1:
            raise UsageError(f"invalid value {place}", where=name, remedy="Use a fraction above 0 and below 1.")
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"{begin} is not before {end}", where="denoising_start", remedy="Use a smaller value.")
    if begin is not None and (image is None or mask is not None):
        raise UsageError(
            "denoising_start requires latents as the image, and no mask",
            where="denoising_start",
            remedy="Pass the other pipeline's latents as the image.",
        )


def _first_word(text: str) -> str:
    return text.partition(" ")[0]


MOST_PIXELS = 1 << 14
"""Maximum height or width in pixels."""


def require_size(multiple: int, height: int | None, width: int | None) -> None:
    """Raise UsageError for a size in pixels that is not a multiple of `multiple`, or too large."""
    for name, size in (("height", height), ("width", width)):
        if size is not None and size > MOST_PIXELS:
            raise UsageError(f"{name} is {size:,} pixels", remedy=f"Use at most {MOST_PIXELS:,}.")
        if size is not None and (size <= 0 or size % multiple):
            raise UsageError(f"{name} is {size} pixels", remedy=f"Use a multiple of {multiple}.")


def require_room(schedule: Schedule, shape: tuple[int, ...], device: str) -> None:
    """Raise UsageError if the outputs of all steps, which are kept, do not fit in free memory. shape: of the
    latents."""
    needed = 4 * (schedule.known(schedule.runs) + schedule.draws) * prod(shape)
    if needed > ALWAYS_THERE and needed > (free := available_bytes(device)):
        raise UsageError(
            f"{schedule.runs:,} steps at this size need {spell_bytes(needed)}, but only {spell_bytes(free)} are free",
            remedy="Use fewer steps, a smaller image, or fewer images at once.",
        )


def prompts_per_image(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None, images: int
) -> tuple[list[str], list[str] | None]:
    """Return a prompt and, if any, a negative prompt for every image, with `images` images per prompt."""
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    repeated = [each for each in prompts for _ in range(images)]
    if negative_prompt is None:
        return repeated, None
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if len(negatives) != len(prompts):
        raise UsageError(
            f"{len(negatives)} negative prompts for {len(prompts)} prompts",
            where="negative_prompt",
            remedy="Pass one for all, or one per prompt.",
        )
    return repeated, [each for each in negatives for _ in range(images)]


def per_image(value: Any, images: int) -> Any:
    """Repeat each text of a list (one per prompt) for the images of its prompt; return anything else unchanged."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return [each for each in value for _ in range(images)]
    return value


def read_image(image: Any, height: int | None, width: int | None, multiple: int) -> torch.Tensor:
    """Return pixels (images, 3, height, width) in [-1, 1], resized to this size or a multiple; latents are
    unchanged."""
    return preprocess(image_reader(multiple, do_convert_rgb=True), image, height, width, "image")


def read_mask(mask: Any, height: int, width: int) -> torch.Tensor:
    """Return (masks, 1, height, width), 1 where the mask is white."""
    reader = image_reader(1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    return preprocess(reader, mask, height, width, "image")


def preprocess(reader: Any, image: Any, height: int | None, width: int | None, where: str) -> torch.Tensor:
    """Run diffusers' image processor; returns (images, channels, height, width). height, width: in pixels; None: the
    image's own. where: for messages. Raises UsageError if it rejects the image."""
    try:
        pixels: torch.Tensor = reader.preprocess(image, height=height, width=width)
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    return pixels


def draw_noises(shape: tuple[int, ...], draws: int, latents: Any, generator: Any) -> list[torch.Tensor]:
    """Return the first noise (or the given latents), then `draws` noises for the scheduler, in diffusers' order."""
    import torch
    from diffusers.utils.torch_utils import randn_tensor

    first = [] if latents is None else [torch.as_tensor(latents, dtype=torch.float32)]
    if first and tuple(first[0].shape) != shape:
        raise UsageError(
            f"have the shape {tuple(first[0].shape)}, expected {shape}",
            where="latents",
            remedy="Pass latents for this image size and number of images, or none.",
        )
    return [*first, *(randn_tensor(shape, generator=generator) for _ in range(draws + 1 - len(first)))]


def make_start(
    noises: Sequence[torch.Tensor],
    image: torch.Tensor | None,
    mask: torch.Tensor | None,
    encode: Callable[[torch.Tensor], torch.Tensor],
    *,
    takes_mask: bool,
    from_image: bool,
) -> Start:
    """Build the Start. noises: from `draw_noises`, on the device. image, mask: as read. encode: the VAE's, pixels to
    latents.
    takes_mask: the denoiser itself takes the mask and the masked image. from_image: the latents start from the image's.

    Raises UsageError if the inputs do not fit together.
    """
    import torch

    noise, *drawn = noises
    if image is None:
        return Start(noise, drawn)
    for given, what, where in ((image, "images to start from", "image"), (mask, "masks", "mask_image")):
        if given is not None and len(noise) % len(given):
            raise UsageError(
                f"{len(given)} {what} for {len(noise)} images to generate",
                where=where,
                remedy="Pass one for all, or as many as divide the number of images.",
            )

    def encoded(pixels: torch.Tensor) -> torch.Tensor:
        pixels = pixels.to(noise.device, torch.float32)
        latents = pixels if pixels.shape[1] == noise.shape[1] else encode(pixels)
        return latents.repeat(len(noise) // len(latents), 1, 1, 1)

    if mask is None:
        return Start(noise, drawn, encoded(image))
    small = torch.nn.functional.interpolate(mask, size=tuple(noise.shape[2:])).to(noise.device)
    small = small.repeat(len(noise) // len(mask), 1, 1, 1)
    if not takes_mask:
        return Start(noise, drawn, encoded(image), small > 0.5)
    if image.shape[1] != 3:
        raise UsageError(
            "an inpainting model requires the image itself, not its latents",
            where="image",
            remedy="Pass pixels: a PIL image, an array, or a tensor with 3 channels.",
        )
    both = lcm(len(image), len(mask))
    kept = mask.repeat(both // len(mask), 1, 1, 1) < 0.5
    context = torch.cat([small, encoded(image.repeat(both // len(image), 1, 1, 1) * kept)], dim=1)
    return Start(noise, drawn, encoded(image) if from_image else None, context=context)
