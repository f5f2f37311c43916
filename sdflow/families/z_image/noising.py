"""Schedules of Z-Image: flow matching from evenly spread sigmas, shifted by a constant or by the image's size."""

from __future__ import annotations

import inspect
from typing import Any

from sdflow.families.shared.noising import Flow
from sdflow.models.base import Config

TURBO_SHIFT = 3.0
"""Of the published Z-Image-Turbo; Z-Image has 6."""


def is_turbo(scheduler: Config) -> bool:
    """Whether this scheduler's config is that of Z-Image-Turbo."""
    return not scheduler.get("use_dynamic_shifting") and scheduler.get("shift") == TURBO_SHIFT


class ZImageNoising(Flow):
    """Sigmas from 1 to 1 / steps, before they are shifted."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, strength: float | None = None) -> None:
        if "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
            super().set_timesteps(scheduler, steps, tokens, strength)  # it says what is wrong
        import torch

        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=self.shift({"max_shift": 1.15, **scheduler.config}, tokens))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: int) -> None:
        """By the functions of diffusers' ZImagePipeline."""
        from diffusers.pipelines.z_image import pipeline_z_image as theirs

        config = scheduler.config
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        given = {name.replace("image_seq_len", "seq_len"): config[name] for name in names if name in config}
        sigmas = theirs.get_default_z_image_sigmas(steps)
        theirs.retrieve_timesteps(scheduler, steps, sigmas=sigmas, mu=theirs.calculate_shift(tokens, **given))


NOISING = ZImageNoising()
