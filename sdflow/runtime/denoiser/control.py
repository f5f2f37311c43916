"""ControlNets: the control images of a call, and a denoiser that applies them.

As in diffusers' ControlNet pipelines, each net runs before the denoiser and returns a residual for each skip connection
and the middle block; the residuals times the net's scale, summed over all nets, are inputs of the denoiser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.models.ports import Role
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
    """A control image. image: any form diffusers accepts, or pixels in [0, 1]. scale: factor of the net's outputs.
    start, end: fractions of the steps between which it applies."""

    image: Any
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


def require_controls(controls: Mapping[str, Control], known: Sequence[str]) -> None:
    """Raise UsageError for unknown nets and invalid numbers. known: the pipeline's nets."""
    for name, control in controls.items():
        where = f"control {name}"
        if name not in known:
            there = (
                f"Its ControlNets: {', '.join(known)}."
                if known
                else "Name ControlNets under `controlnets` in the workflow, and rebuild."
            )
            raise UsageError(f"the pipeline has no ControlNet {name!r}", where=where, remedy=there)
        if not math.isfinite(control.scale):
            raise UsageError(
                f"{control.scale} is not a valid scale",
                where=where,
                remedy="Use a number between 0 and 1, or slightly more.",
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
    """Combine a call's arguments per net; each number is for all nets or by name. images: may contain Control objects,
    which take precedence over the numbers."""

    def of(name: str, value: float | Mapping[str, float], default: float) -> float:
        return float(value.get(name, default) if isinstance(value, Mapping) else value)

    for which in (scale, start, end):
        if isinstance(which, Mapping) and (unknown := sorted(set(which) - set(images or ()))):
            raise UsageError(
                f"there is no image for the ControlNet {unknown[0]!r}",
                where="control",
                remedy="Pass its image too, or leave out its numbers.",
            )
    return {
        name: image
        if isinstance(image, Control)
        else Control(image, of(name, scale, 1.0), of(name, start, 0.0), of(name, end, 1.0))
        for name, image in (images or {}).items()
    }


def read_controls(
    controls: Mapping[str, Control], images: int, height: int | None, width: int | None, multiple: int
) -> dict[str, Control]:
    """Return the controls with their images as pixels (images, 3, height, width) in [0, 1], all of one size.

    images: number of images to generate; a net has one control image for all, or one per prompt. height, width: default
    to the first control image's size. multiple: sizes are rounded to a multiple of it.
    """
    reader = image_reader(multiple, do_convert_rgb=True, do_normalize=False)
    read: dict[str, Control] = {}
    for name, control in controls.items():
        pixels = preprocess(reader, control.image, height, width, f"control {name}")
        height, width = (int(size) for size in pixels.shape[2:])
        if images % len(pixels):
            raise UsageError(
                f"{len(pixels)} control images for {images} images to generate",
                where=f"control {name}",
                remedy="Pass one for all, or one per prompt.",
            )
        pixels = pixels.repeat_interleave(images // len(pixels), dim=0)
        read[name] = Control(pixels, control.scale, control.start, control.end)
    return read


class ControlledDenoiser:
    """A whole denoiser with ControlNets that run before it. Implements `runtime.denoiser.Denoiser`."""

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
        """nets, controls: by name. sizes: of the graphs' axes. images: rows without guidance. guess: diffusers'
        `guess_mode`: with guidance, the nets only see the prompts, not the negative ones, and deeper residuals weigh
        more."""
        self._denoiser = denoiser
        tensors = denoiser.inputs
        self._residuals = {name: value for name, value in tensors.items() if is_residual(name)}
        rows = images if guess else sizes["batch"]
        self._nets = [
            _Net(nets[name], control, {**sizes, "batch": rows}, tensors[denoiser.moving.latents], guess=guess)
            for name, control in controls.items()
        ]

    def run(self, inputs: DenoiserInputs, latents: torch.Tensor, index: int) -> torch.Tensor:
        """Run the nets that apply in this step, then the denoiser with the sum of their residuals. Shapes as in
        `Denoiser.run`."""
        self._denoiser.put(inputs, latents, index)
        for residual in self._residuals.values():
            residual.zero_()
        for net in self._nets:
            if net.counts(index, inputs.schedule.runs):
                net.add(inputs, index, self._residuals)
        return self._denoiser.predict()


class _Net:
    """A ControlNet with its bound tensors."""

    def __init__(
        self, model: Submodel, control: Control, sizes: Mapping[str, int], sample: torch.Tensor, *, guess: bool
    ) -> None:
        self._control, self._guess = control, guess
        self._bound: Bound = model.bound(**model.shapes(sizes))
        self._rows = sizes["batch"]
        ports = model.part.ports(model.config)
        self._moving, self._hint = Moving.of(ports), ports.of(Role.HINT)
        own = self._bound.inputs[self._moving.latents]
        # Inpainting denoisers: only the latent channels. In guess mode: only the prompts' rows, which are last.
        self._sample = sample[-self._rows :, : own.shape[1]]

    def counts(self, index: int, runs: int) -> bool:
        """Whether the net applies in this run: as in diffusers, only if the whole step lies within its interval."""
        return not (index / runs < self._control.start or (index + 1) / runs > self._control.end)

    def add(self, inputs: DenoiserInputs, index: int, residuals: Mapping[str, torch.Tensor]) -> None:
        """Run the net on the denoiser's latents and add its outputs to the residuals."""
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
        """Return the factor of each output, the middle last."""
        if not self._guess:
            return [self._control.scale] * count
        return [self._control.scale * 10 ** (place / (count - 1) - 1) for place in range(count)]
