"""Images that control a drawing (ControlNets): what a call says of them, and the denoiser that they change.

As diffusers' ControlNet pipelines do it: before each run of the denoiser each net gives a tensor for each of its skip
connections and its middle; times the net's scale, all nets together, they are added there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.models.base import Role
from sdflow.models.residuals import is_residual
from sdflow.models.vae import image_reader
from sdflow.runtime.denoiser.denoiser import DenoiserInputs, WholeDenoiser
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.start import preprocess
from sdflow.runtime.sessions.bound import Bound
from sdflow.runtime.sessions.submodel import Submodel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Control:
    """What a ControlNet is told. image: as diffusers takes it, or pixels in [0, 1]. scale: how much its outputs count. start,
    end: the part of the steps in which they do, from 0 to 1."""

    image: Any
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


def require_controls(controls: Mapping[str, Control], known: Sequence[str]) -> None:
    """Raises UsageError for a net that is not there, and for numbers that mean nothing. known: the pipeline's nets."""
    for name, control in controls.items():
        where = f"control {name}"
        if name not in known:
            there = (
                f"Its ControlNets: {', '.join(known)}." if known else "Name ControlNets under `controlnets` and build."
            )
            raise UsageError(f"the pipeline has no ControlNet {name!r}", where=where, remedy=there)
        if not math.isfinite(control.scale):
            raise UsageError(
                f"{control.scale} is no scale", where=where, remedy="It is between 0 and 1, or a little more."
            )
        if not 0 <= control.start < control.end <= 1:
            raise UsageError(
                f"it begins at {control.start:g} and ends at {control.end:g} of the steps",
                where=where,
                remedy="The first must be less than the second, both from 0 to 1.",
            )


def controls_of(
    images: Mapping[str, Any] | None,
    scale: float | Mapping[str, float],
    start: float | Mapping[str, float],
    end: float | Mapping[str, float],
) -> dict[str, Control]:
    """A call's arguments, each one number for all nets or one for each, put together for each net. images: also as Control, which
    then says all of it."""

    def of(name: str, value: float | Mapping[str, float], default: float) -> float:
        return float(value.get(name, default) if isinstance(value, Mapping) else value)

    for which in (scale, start, end):
        if isinstance(which, Mapping) and (unknown := sorted(set(which) - set(images or ()))):
            raise UsageError(f"there is no image for the ControlNet {unknown[0]!r}", where="control")
    return {
        name: image
        if isinstance(image, Control)
        else Control(image, of(name, scale, 1.0), of(name, start, 0.0), of(name, end, 1.0))
        for name, image in (images or {}).items()
    }


def read_controls(
    controls: Mapping[str, Control], images: int, height: int | None, width: int | None, multiple: int
) -> dict[str, Control]:
    """The controls with their images as pixels, (images, 3, height, width) in [0, 1], all of one size.

    images: how many are drawn; a net's image is for all of them, or one for each prompt. height, width: None for that of the
    first image. multiple: sizes are rounded to one.
    """
    reader = image_reader(multiple, do_convert_rgb=True, do_normalize=False)
    read: dict[str, Control] = {}
    for name, control in controls.items():
        pixels = preprocess(reader, control.image, height, width, f"control {name}")
        height, width = (int(size) for size in pixels.shape[2:])
        if images % len(pixels):
            raise UsageError(f"{len(pixels)} images for {images} to draw", where=f"control {name}")
        pixels = pixels.repeat_interleave(images // len(pixels), dim=0)
        read[name] = Control(pixels, control.scale, control.start, control.end)
    return read


class ControlledDenoiser:
    """A whole denoiser, and nets that run before it. `runtime.denoiser.Denoiser`."""

    def __init__(
        self,
        denoiser: WholeDenoiser,
        nets: Mapping[str, Submodel],
        controls: Mapping[str, Control],
        sizes: Mapping[str, int],
        images: int,
        *,
        guess: bool = False,
    ) -> None:
        """nets, controls: by name. sizes: of the graphs' axes. images: rows without guidance. guess: diffusers' `guess_mode`:
        with guidance the nets see the prompts and not the negative ones; the deeper a residual, the more it counts."""
        self._denoiser = denoiser
        tensors = denoiser.inputs
        self._residuals = {name: value for name, value in tensors.items() if is_residual(name)}
        rows = images if guess else sizes["batch"]
        self._nets = [
            _Net(nets[name], control, {**sizes, "batch": rows}, tensors[denoiser.moving.latents], guess=guess)
            for name, control in controls.items()
        ]

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """As of `Denoiser.run`: first the nets that count in this step, then the denoiser with the sum of their residuals.
        latents: (images, channels, rows, columns), float32 -> (rows of the batch, channels, rows, columns)."""
        self._denoiser.put(inputs, latents, index)
        for residual in self._residuals.values():
            residual.zero_()
        for net in self._nets:
            if net.counts(index, inputs.schedule.runs):
                net.add(inputs, index, self._residuals)
        return self._denoiser.predict()


class _Net:
    """A ControlNet with its tensors."""

    def __init__(
        self, model: Submodel, control: Control, sizes: Mapping[str, int], sample: torch.Tensor, *, guess: bool
    ) -> None:
        self._control, self._guess = control, guess
        self._bound: Bound = model.bound(**model.shapes(sizes))
        self._rows = sizes["batch"]
        ports = model.part.ports(model.config)
        self._moving, self._hint = Moving.of(ports), ports.of(Role.HINT)
        own = self._bound.inputs[self._moving.latents]
        # Of a denoiser for inpainting the latents alone. In guess mode the last rows: those of the prompts.
        self._sample = sample[-self._rows :, : own.shape[1]]

    def counts(self, index: int, runs: int) -> bool:
        """Whether it is in use in this run of so many, as in diffusers: only where the whole step lies within."""
        return not (index / runs < self._control.start or (index + 1) / runs > self._control.end)

    def add(self, inputs: DenoiserInputs, index: int, residuals: Mapping[str, torch.Tensor]) -> None:
        """Add what it gives for the denoiser's latents to the residuals."""
        tensors, pixels = self._bound.inputs, self._control.image
        if self._bound.holds is not inputs:
            for name, value in inputs.conditions.items():
                if name in tensors:
                    tensors[name].copy_(value[-self._rows :])
            hint = tensors[self._hint]
            hint.copy_(pixels.repeat(len(hint) // len(pixels), 1, 1, 1))
            self._bound.holds = inputs
        tensors[self._moving.latents].copy_(self._sample)
        tensors[self._moving.timestep].copy_(inputs.schedule.timesteps[index])
        for scale, (name, value) in zip(self._scales(len(residuals)), self._bound.run().items(), strict=True):
            residuals[name][-self._rows :].add_(value, alpha=scale)

    def _scales(self, count: int) -> list[float]:
        """How much each output counts, the middle last."""
        if not self._guess:
            return [self._control.scale] * count
        return [self._control.scale * 10 ** (place / (count - 1) - 1) for place in range(count)]
