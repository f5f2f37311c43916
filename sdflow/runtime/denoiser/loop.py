"""The loop over the steps: three small kernels beside each run of the denoiser, nothing that waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdflow.errors import UsageError
from sdflow.machine.memory import available_bytes
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.schedule import Schedule
from sdflow.runtime.denoiser.scheduler_walk import FIRST_DRAWN
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


def require_room(schedule: Schedule, shape: tuple[int, ...], device: str) -> None:
    """Raises UsageError where what the steps give, all of which is kept, does not fit in the memory that is free. shape: of the
    latents."""
    needed = 4 * (schedule.known(schedule.runs) + schedule.draws) * math.prod(shape)
    if needed > ALWAYS_THERE and needed > (free := available_bytes(device)):
        raise UsageError(
            f"{schedule.runs:,} steps of an image of this size give {spell_bytes(needed)}, and {spell_bytes(free)} are free",
            remedy="Take fewer steps, a smaller image, or fewer images at once.",
        )


def denoise(
    denoiser: Denoiser,
    schedule: Schedule,
    start: Start,
    conditions: Mapping[str, torch.Tensor],
    on_step: Callable[[int, int, int], None] | None = None,
    on_clean: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The finished latents, float32, of the shape of the noise.

    schedule: on the device of the noise. conditions: what the denoiser reads beside latents and timestep, a row for each
    image; with a guided schedule twice as many, the negative prompts' first. on_step: called with index, timestep and number
    of all runs when one is computed (on CUDA: queued). on_clean: called with the index and the latents as the model thinks
    they are without noise.
    """
    import torch

    shape, channels = start.noise.shape, start.noise.shape[1]
    denoiser.begin(conditions, schedule)
    if start.context is not None:
        denoiser.sample[:, :, channels:].copy_(start.context)

    # A column per value, a row per term: those that are there from the start, then the outputs as they come.
    terms = torch.zeros(schedule.known(schedule.runs), start.noise.numel(), device=start.noise.device)
    for row, term in zip(terms, (start.noise, start.image, *start.drawn), strict=False):
        if term is not None:
            row.copy_(term.reshape(-1))

    def latents(index: int) -> torch.Tensor:
        known = schedule.known(index)
        # A product of matrix and vector: on a GPU it is always computed in full float32.
        drawn = torch.mv(terms[:known].T, schedule.inputs[index, :known]).view(shape)
        if start.mask is None:
            return drawn
        return torch.where(start.mask, drawn, torch.mv(terms[:FIRST_DRAWN].T, schedule.kept[index]).view(shape))

    def clean(index: int) -> torch.Tensor:
        row = schedule.clean_row(index)
        seen = torch.mv(terms[: len(row)].T, row).view(shape)
        return seen if start.mask is None or start.image is None else torch.where(start.mask, seen, start.image)

    for index in range(schedule.runs):
        denoiser.sample[:, :, :channels].copy_(latents(index))
        output = denoiser.step(index)
        halves = schedule.made[index] if schedule.made else schedule.halves
        end = schedule.known(index + 1)
        terms[end - halves : end].copy_(output.view(halves, -1))
        if on_step is not None:
            on_step(index, schedule.numbers[index], schedule.runs)
        if on_clean is not None:
            on_clean(index, clean(index))
    return latents(schedule.runs)
