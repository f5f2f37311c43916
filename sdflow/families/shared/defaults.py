"""Default steps, guidance scale, strength and eta.

Families start from diffusers' defaults for each task. Few-step models are detected from the denoiser's config or the
scheduler; settings that neither reveals come from `sdflow.families.shared.few_steps` or a workflow's `generate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from sdflow.models.base import Config

Task = Literal["text", "image", "inpaint"]
"""Text to image, image to image, or inpainting (the white part of a mask)."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of one task.

    steps: of denoising. guidance_scale: no guidance at 1 or below. strength: the fraction of the steps applied to an input
    image. eta: the amount of noise that DDIM and TCD add per step, 0 to 1.
    """

    steps: int
    guidance_scale: float
    strength: float = 1.0
    eta: float = 0.0

    def steps_at(self, strength: float) -> int:
        """The number of steps, raised where necessary so that at least one remains at this strength."""
        if not 0 < strength <= 1:
            return self.steps  # out of range; rejected elsewhere
        steps = max(self.steps, math.ceil(1 / strength))
        return steps if int(steps * strength) else steps + 1  # 49 * (1 / 49) is less than 1


def settled(
    own: Mapping[Task, Defaults], denoiser: Config, scheduler: Config, said: Mapping[str, Any]
) -> dict[Task, Defaults]:
    """A family's defaults, overridden first by what the configs reveal, then by `said` (names that are not fields of
    `Defaults` are ignored). Strength does not apply to text to image."""
    named = {field.name for field in fields(Defaults)}
    changed = {
        name: value for name, value in {**few_step_defaults(denoiser, scheduler), **said}.items() if name in named
    }
    of_text = {name: value for name, value in changed.items() if name != "strength"}
    return {task: replace(each, **(of_text if task == "text" else changed)) for task, each in own.items()}


def few_step_defaults(denoiser: Config, scheduler: Config) -> dict[str, Any]:
    """Defaults of a few-step model, detected from its configs; empty for other models.

    scheduler: its config, with `_class_name`.
    """
    kind = scheduler.get("_class_name")
    if denoiser.get("time_cond_proj_dim") is not None:  # a latent consistency model: https://arxiv.org/abs/2310.04378
        return {"steps": 4, "guidance_scale": 8.0}
    if kind == "LCMScheduler":  # the same as a LoRA: https://arxiv.org/abs/2311.05556
        return {"steps": 4, "guidance_scale": 1.0}
    if kind == "TCDScheduler":  # https://arxiv.org/abs/2402.19159
        return {"steps": 4, "guidance_scale": 0.0, "eta": 0.3}
    ordinary = scheduler.get("prediction_type", "epsilon") == "epsilon" and not scheduler.get("rescale_betas_zero_snr")
    trailing = scheduler.get("timestep_spacing") == "trailing"
    # Turbo and Lightning are published like this. Models with trailing spacing for other reasons predict v or use zero SNR.
    if trailing and ordinary and kind in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"):
        return {"steps": 4, "guidance_scale": 0.0}
    return {}
