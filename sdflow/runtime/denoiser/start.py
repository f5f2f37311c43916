"""What an image begins with: prompts, sizes, noise, an image and a mask, made ready for the first step."""

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
"""Bytes for which free memory is not looked up."""


@dataclass(frozen=True)
class Start:
    """What the latents are made of, on the device; the shape of each is (images, channels, rows, columns).

    noise: standard normal. drawn: the noises that the scheduler draws, `Schedule.draws` of them. image: the latents of
    the image to start from. mask: True where an inpainting draws, one channel; None to draw everywhere. context: further
    channels of the denoiser's input, for one made for inpainting.
    """

    noise: torch.Tensor
    drawn: list[torch.Tensor]
    image: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    context: torch.Tensor | None = None


def require_start(task: Task, image: Any, mask: Any, names: tuple[str, str] = ("image", "mask_image")) -> None:
    """Raises UsageError when a pipeline of this task is not given what it starts from. names: how the user calls them."""
    if mask is not None and image is None:
        raise UsageError(
            "a mask needs the image that it belongs to", where=_first_word(names[1]), remedy=f"Add {names[0]}."
        )
    missing = [name for name, given in zip(names, (image, mask), strict=True) if given is None]
    if task == "inpaint" and missing:
        raise UsageError(
            "this model is for inpainting: it draws into the white part of a mask, beside the rest of an image",
            where=_first_word(missing[0]),
            remedy=f"Add {' and '.join(missing)}. A mask that is white everywhere draws from text alone.",
        )
    if task == "image" and image is None:
        raise UsageError("this model goes on from an image", where=_first_word(names[0]), remedy=f"Add {names[0]}.")


def require_span(begin: float | None, end: float | None, image: Any, mask: Any) -> None:
    """Raises UsageError for parts of the way from noise to image that are none, and without what they begin with."""
    for name, place in (("denoising_start", begin), ("denoising_end", end)):
        if place is not None and not 0 < place < 1:
            raise UsageError(f"it is {place}", where=name, remedy="Give a part of the way, above 0 and below 1.")
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"{begin} is not before {end}", where="denoising_start", remedy="Take a smaller one.")
    if begin is not None and (image is None or mask is not None):
        raise UsageError(
            "what begins on the way begins with latents, and without a mask",
            where="denoising_start",
            remedy="Give the latents that the other pipeline left there as the image.",
        )


def _first_word(text: str) -> str:
    return text.partition(" ")[0]


MOST_PIXELS = 1 << 14
"""Of a side."""


def require_size(multiple: int, height: int | None, width: int | None) -> None:
    """Raises UsageError for a size in pixels that is no multiple of this, or beyond what anything can draw."""
    for name, size in (("height", height), ("width", width)):
        if size is not None and size > MOST_PIXELS:
            raise UsageError(f"{name} is {size:,} pixels", remedy=f"At most {MOST_PIXELS:,} are drawn.")
        if size is not None and (size <= 0 or size % multiple):
            raise UsageError(f"{name} is {size} pixels", remedy=f"Take a multiple of {multiple}.")


def require_room(schedule: Schedule, shape: tuple[int, ...], device: str) -> None:
    """Raises UsageError where what the steps give, all of which is kept, does not fit in the memory that is free. shape: of the
    latents."""
    needed = 4 * (schedule.known(schedule.runs) + schedule.draws) * prod(shape)
    if needed > ALWAYS_THERE and needed > (free := available_bytes(device)):
        raise UsageError(
            f"{schedule.runs:,} steps of an image of this size give {spell_bytes(needed)}, and {spell_bytes(free)} are free",
            remedy="Take fewer steps, a smaller image, or fewer images at once.",
        )


def prompts_per_image(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None, images: int
) -> tuple[list[str], list[str] | None]:
    """A prompt and, where there is one, a negative prompt for every image, `images` of each prompt."""
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    repeated = [each for each in prompts for _ in range(images)]
    if negative_prompt is None:
        return repeated, None
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if len(negatives) != len(prompts):
        raise UsageError(f"{len(negatives)} negative prompts for {len(prompts)} prompts")
    return repeated, [each for each in negatives for _ in range(images)]


def per_image(value: Any, images: int) -> Any:
    """A list of texts, one a prompt, with each repeated for the images of its prompt; anything else as it is."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return [each for each in value for _ in range(images)]
    return value


def read_image(image: Any, height: int | None, width: int | None, multiple: int) -> torch.Tensor:
    """(images, 3, height, width) in [-1, 1], resized to these pixels and to a multiple; latents stay as they are."""
    return preprocess(image_reader(multiple, do_convert_rgb=True), image, height, width, "image")


def read_mask(mask: Any, height: int, width: int) -> torch.Tensor:
    """(masks, 1, height, width), 1 where it is white."""
    reader = image_reader(1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    return preprocess(reader, mask, height, width, "image")


def preprocess(reader: Any, image: Any, height: int | None, width: int | None, where: str) -> torch.Tensor:
    """What diffusers' reader makes of an image. where: for messages. Raises UsageError for what is none."""
    try:
        pixels: torch.Tensor = reader.preprocess(image, height=height, width=width)
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    return pixels


def draw_noises(shape: tuple[int, ...], draws: int, latents: Any, generator: Any) -> list[torch.Tensor]:
    """The first noise, or the latents given for it, then `draws` for the scheduler, in the order of diffusers."""
    import torch
    from diffusers.utils.torch_utils import randn_tensor

    first = [] if latents is None else [torch.as_tensor(latents, dtype=torch.float32)]
    if first and tuple(first[0].shape) != shape:
        raise UsageError(f"latents of shape {tuple(first[0].shape)}, expected {shape}")
    return [*first, *(randn_tensor(shape, generator=generator) for _ in range(draws + 1 - len(first)))]


def make_start(
    noises: Sequence[torch.Tensor],
    image: torch.Tensor | None,
    mask: torch.Tensor | None,
    encode: Callable[[torch.Tensor], torch.Tensor],
    *,
    beside: bool,
    from_image: bool,
) -> Start:
    """noises: as of `draw_noises`, on the device. image, mask: as read. encode: of the VAE, pixels to latents.
    beside: the denoiser itself takes the mask and the masked image. from_image: the latents begin with the image's.

    Raises UsageError where they do not go together.
    """
    import torch

    noise, *drawn = noises
    if image is None:
        return Start(noise, drawn)
    for given, what, where in ((image, "images to start from", "image"), (mask, "masks", "mask_image")):
        if given is not None and len(noise) % len(given):
            raise UsageError(f"{len(given)} {what}, for {len(noise)} to draw", where=where)

    def encoded(pixels: torch.Tensor) -> torch.Tensor:
        pixels = pixels.to(noise.device, torch.float32)
        latents = pixels if pixels.shape[1] == noise.shape[1] else encode(pixels)
        return latents.repeat(len(noise) // len(latents), 1, 1, 1)

    if mask is None:
        return Start(noise, drawn, encoded(image))
    small = torch.nn.functional.interpolate(mask, size=tuple(noise.shape[2:])).to(noise.device)
    small = small.repeat(len(noise) // len(mask), 1, 1, 1)
    if not beside:
        return Start(noise, drawn, encoded(image), small > 0.5)
    if image.shape[1] != 3:
        raise UsageError("a model for inpainting needs the image itself, not its latents", where="image")
    both = lcm(len(image), len(mask))
    kept = mask.repeat(both // len(mask), 1, 1, 1) < 0.5
    context = torch.cat([small, encoded(image.repeat(both // len(image), 1, 1, 1) * kept)], dim=1)
    return Start(noise, drawn, encoded(image) if from_image else None, context=context)
