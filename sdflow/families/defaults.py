"""What a call takes where the caller says nothing: steps, guidance, strength.

Each family has diffusers' own, for each task. A model that draws in few steps says so itself, by its denoiser's config or by
its scheduler; what neither can say (`sdflow.families.few_steps`, a workflow's `generate`) is told besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from sdflow.families.approximation import GUIDANCE_INTERVAL, REUSE
from sdflow.models.base import Config

Task = Literal["text", "image", "inpaint"]
"""An image from text alone, from another image too, or into the white part of a mask."""


SAID: Mapping[str, type | tuple[type, ...]] = {
    "steps": int,
    "guidance_scale": (int, float),
    "strength": (int, float),
    "eta": (int, float),
    "scheduler": str,
    REUSE: dict,
    GUIDANCE_INTERVAL: dict,
}
"""What may be said of how a model draws, besides what its configs tell, and of which type it is."""


@dataclass(frozen=True)
class Defaults:
    """Of one task. steps: of denoising. guidance_scale: up to 1 there is none. strength: the part of the steps that an image
    goes through. eta: how much noise DDIM and TCD add in a step, from 0 to 1."""

    steps: int
    guidance_scale: float
    strength: float = 1.0
    eta: float = 0.0

    def steps_at(self, strength: float) -> int:
        """The steps; as many more as leave one at this strength, where they would leave none."""
        if not 0 < strength <= 1:
            return self.steps  # nobody draws that
        steps = max(self.steps, math.ceil(1 / strength))
        return steps if int(steps * strength) else steps + 1  # 49 * (1 / 49) is less than 1


def settled(
    own: Mapping[Task, Defaults], denoiser: Config, scheduler: Config, said: Mapping[str, Any]
) -> dict[Task, Defaults]:
    """A family's own defaults, changed by what the configs tell, and by what is said besides: values by name; those of other
    names are nothing that a call takes. From text alone all steps are gone through: a strength is not for that."""
    named = {field.name for field in fields(Defaults)}
    changed = {name: value for name, value in {**told_by_configs(denoiser, scheduler), **said}.items() if name in named}
    of_text = {name: value for name, value in changed.items() if name != "strength"}
    return {task: replace(each, **(of_text if task == "text" else changed)) for task, each in own.items()}


def told_by_configs(denoiser: Config, scheduler: Config) -> dict[str, Any]:
    """What the configs tell of a model that draws in few steps; nothing for others.

    scheduler: its config, with `_class_name`.
    """
    kind = scheduler.get("_class_name")
    if denoiser.get("time_cond_proj_dim") is not None:  # a latent consistency model: https://arxiv.org/abs/2310.04378
        return {"steps": 4, "guidance_scale": 8.5}
    if kind == "LCMScheduler":  # the same as a LoRA: https://arxiv.org/abs/2311.05556
        return {"steps": 4, "guidance_scale": 1.0}
    if kind == "TCDScheduler":  # https://arxiv.org/abs/2402.19159
        return {"steps": 4, "guidance_scale": 0.0, "eta": 0.3}
    ordinary = scheduler.get("prediction_type", "epsilon") == "epsilon" and not scheduler.get("rescale_betas_zero_snr")
    trailing = scheduler.get("timestep_spacing") == "trailing"
    # So Turbo and Lightning are published. Models that need it for another reason predict v, or begin with noise alone.
    if trailing and ordinary and kind in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"):
        return {"steps": 4, "guidance_scale": 0.0}
    return {}
