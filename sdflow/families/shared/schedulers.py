"""The schedulers that a pipeline may be given by name: those of its family's noising."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from sdflow.errors import UsageError
from sdflow.models.base import Config

SchedulerName = Literal[
    "ddim", "ddim_trailing", "euler", "euler_trailing", "euler_a", "euler_a_trailing", "dpm++_2m", "unipc", "lcm", "tcd", "pndm",
    "flow_euler",
]  # fmt: skip

_TRAILING = {"timestep_spacing": "trailing"}

SchedulerRow = tuple[str, Mapping[str, Any]]
"""A class of diffusers, and the options that make it what the name says."""

NOISE_SCHEDULERS: Mapping[str, SchedulerRow] = {
    "ddim": ("DDIMScheduler", {}),
    "ddim_trailing": ("DDIMScheduler", _TRAILING),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_trailing": ("EulerDiscreteScheduler", _TRAILING),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "euler_a_trailing": ("EulerAncestralDiscreteScheduler", _TRAILING),
    "dpm++_2m": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
}
"""Those of families with a table of alphas, by name."""

FLOW_SCHEDULERS: Mapping[str, SchedulerRow] = {"flow_euler": ("FlowMatchEulerDiscreteScheduler", {})}
"""Those of families of flow matching, by name."""

SCHEDULERS: Mapping[str, SchedulerRow] = {**NOISE_SCHEDULERS, **FLOW_SCHEDULERS}
"""Name -> class in diffusers, and options. A family draws with those of its noising (`sdflow.families.shared.noising`)."""


def prediction(config: Config, otherwise: str) -> str:
    """What a denoiser makes for a scheduler of this config, as diffusers calls it. otherwise: where the config does not
    say it."""
    return str(config.get("prediction_type", otherwise))


_CONSISTENCY_ALONE = ("original_inference_steps", "timestep_scaling")
_CONSISTENCY = (
    *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("prediction_type", "timestep_spacing", "steps_offset", "set_alpha_to_one", "clip_sample", "clip_sample_range"),
    *("thresholding", "dynamic_thresholding_ratio", "sample_max_value", *_CONSISTENCY_ALONE),
)
"""The settings that LCM and TCD have."""


def require_known(name: str, where: str = "--scheduler", schedulers: Mapping[str, SchedulerRow] = SCHEDULERS) -> None:
    """Raises UsageError with the nearest known name for a scheduler that is not one of these. schedulers: the family's,
    where it is known."""
    if name not in schedulers:
        near = get_close_matches(name.lower(), schedulers, n=1, cutoff=0.3)
        raise UsageError(
            (f"{name} does not fit this model" if name in SCHEDULERS else f"no scheduler is named {name!r}")
            + (f"; did you mean {near[0]!r}?" if near else ""),
            where=where,
            remedy=f"Known: {', '.join(schedulers)}.",
        )


def renamed(config: Config, name: str) -> dict[str, Any]:
    """A scheduler's config as one of SCHEDULERS, with the same noise schedule. diffusers loads it without a word: the
    schedulers of ordinary models know each other's settings, those of consistency models only their own."""
    cls, options = SCHEDULERS[name]
    own = name in ("lcm", "tcd")
    kept = {
        key: value for key, value in config.items() if (key in _CONSISTENCY if own else key not in _CONSISTENCY_ALONE)
    }
    return {**kept, "_class_name": cls, **options}
