"""The schedulers that a pipeline may be given by name: a table of samplers, and one of spacings of their steps.

A name is that of a sampler, or of a sampler and a spacing: `dpm++_2m`, `dpm++_2m_karras`. A new sampler is a row here. The
options of commands, the fields of both HTTP APIs, the keys of workflows, the text of images and the lists of A1111's API are
derived from the rows (`sdflow.families.shared.sampler_names` reads and writes other programs' names).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from sdflow.errors import UsageError
from sdflow.families.shared.brownian import with_drawn_noise
from sdflow.machine.packages import require_packages
from sdflow.models.base import Config

SchedulerRow = tuple[str, Mapping[str, Any]]
"""A class of diffusers, and the options that make it what the name says."""


@dataclass(frozen=True)
class Spacing:
    """Where the steps lie. options: of the scheduler. webui: A1111's label. others: further names, of A1111, ComfyUI and
    InvokeAI. needs: distributions."""

    options: Mapping[str, Any]
    webui: str
    others: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def _sigmas(kind: str) -> dict[str, bool]:
    """diffusers takes one of them at most."""
    return {f"use_{each}_sigmas": each == kind for each in ("karras", "exponential", "beta")}


SPACINGS: Mapping[str, Spacing] = {
    "trailing": Spacing({"timestep_spacing": "trailing"}, "SGM Uniform"),
    "karras": Spacing(_sigmas("karras"), "Karras", ("k",)),
    "exponential": Spacing(_sigmas("exponential"), "Exponential"),
    "beta": Spacing(_sigmas("beta"), "Beta", needs=("scipy",)),
}
"""Spacing -> what it is. Without one, the steps lie as the pipeline's own scheduler is configured."""

SIGMAS = ("karras", "exponential", "beta")
_ALL = tuple(SPACINGS)


@dataclass(frozen=True)
class Sampler:
    """A class of diffusers' schedulers with these options. webui, comfyui, invokeai: what they call it; "": they have none
    such. spacings: that it can take. automatic: the spacing that A1111's webui gives it unless told otherwise; "": none.
    needs: distributions. runs: of the denoiser for a step (diffusers' `order`)."""

    scheduler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    webui: str = ""
    comfyui: str = ""
    invokeai: str = ""
    spacings: tuple[str, ...] = ()
    automatic: str = ""
    needs: tuple[str, ...] = ()
    runs: int = 1


def _multistep(order: int, *, sde: bool = False, **more: str) -> dict[str, Any]:
    return {"algorithm_type": "sde-dpmsolver++" if sde else "dpmsolver++", "solver_order": order, **more}


_MULTISTEP = "DPMSolverMultistepScheduler"
_SDE = "DPMSolverSDEScheduler"

NOISE_SAMPLERS: Mapping[str, Sampler] = {
    "ddim": Sampler("DDIMScheduler", {}, "DDIM", "ddim", "ddim", ("trailing",)),
    "euler": Sampler("EulerDiscreteScheduler", {}, "Euler", "euler", "euler", _ALL),
    "euler_a": Sampler("EulerAncestralDiscreteScheduler", {}, "Euler a", "euler_ancestral", "euler_a", ("trailing",)),
    "dpm++_2m": Sampler(_MULTISTEP, _multistep(2), "DPM++ 2M", "dpmpp_2m", "dpmpp_2m", _ALL, "karras"),
    "dpm++_2m_sde": Sampler(
        _MULTISTEP,
        _multistep(2, sde=True, solver_type="midpoint"),
        "DPM++ 2M SDE",
        "dpmpp_2m_sde",
        "dpmpp_2m_sde",
        _ALL,
        "exponential",
    ),
    "dpm++_2m_sde_heun": Sampler(
        _MULTISTEP,
        _multistep(2, sde=True, solver_type="heun"),
        "DPM++ 2M SDE Heun",
        "dpmpp_2m_sde_heun",
        "",
        _ALL,
        "exponential",
    ),
    "dpm++_3m": Sampler(_MULTISTEP, _multistep(3), invokeai="dpmpp_3m", spacings=_ALL),
    "dpm++_3m_sde": Sampler(
        _MULTISTEP,
        _multistep(3, sde=True, solver_type="midpoint"),
        "DPM++ 3M SDE",
        "dpmpp_3m_sde",
        "",
        _ALL,
        "exponential",
    ),
    "dpm++_sde": Sampler(_SDE, {}, "DPM++ SDE", "dpmpp_sde", "dpmpp_sde", _ALL, "karras", ("torchsde", "scipy"), 2),
    "dpm2": Sampler("KDPM2DiscreteScheduler", {}, "DPM2", "dpm_2", "kdpm_2", _ALL, "karras", runs=2),
    "dpm2_a": Sampler(
        "KDPM2AncestralDiscreteScheduler", {}, "DPM2 a", "dpm_2_ancestral", "kdpm_2_a", _ALL, "karras", runs=2
    ),
    "heun": Sampler("HeunDiscreteScheduler", {}, "Heun", "heun", "heun", _ALL, runs=2),
    "lms": Sampler("LMSDiscreteScheduler", {}, "LMS", "lms", "lms", _ALL, needs=("scipy",)),
    "deis": Sampler("DEISMultistepScheduler", {"algorithm_type": "deis"}, "", "deis", "deis", _ALL),
    "unipc": Sampler("UniPCMultistepScheduler", {}, "UniPC", "uni_pc", "unipc", _ALL),
    "lcm": Sampler("LCMScheduler", {}, "LCM", "lcm", "lcm"),
    "tcd": Sampler("TCDScheduler", {}, "TCD", "tcd", "tcd"),
    "pndm": Sampler("PNDMScheduler", {"skip_prk_steps": True}, "PLMS", "", "pndm"),
}
"""Those of families with a table of alphas, by name."""

FLOW_SAMPLERS: Mapping[str, Sampler] = {
    "flow_euler": Sampler("FlowMatchEulerDiscreteScheduler", {}, "Euler", "euler", "euler", SIGMAS)
}
"""Those of families of flow matching, by name."""

SAMPLERS: Mapping[str, Sampler] = {**NOISE_SAMPLERS, **FLOW_SAMPLERS}


@dataclass(frozen=True)
class _Named:
    row: SchedulerRow
    sampler: str
    spacing: str
    needs: tuple[str, ...]


def _named(samplers: Mapping[str, Sampler]) -> Iterator[tuple[str, _Named]]:
    for name, sampler in samplers.items():
        yield name, _Named((sampler.scheduler, sampler.options), name, "", sampler.needs)
        for each in sampler.spacings:
            spacing = SPACINGS[each]
            row = sampler.scheduler, {**sampler.options, **spacing.options}
            yield f"{name}_{each}", _Named(row, name, each, tuple(dict.fromkeys((*sampler.needs, *spacing.needs))))


_NAMED = dict(_named(SAMPLERS))

NOISE_SCHEDULERS: Mapping[str, SchedulerRow] = {name: each.row for name, each in _named(NOISE_SAMPLERS)}
"""Those of families with a table of alphas, by name."""

FLOW_SCHEDULERS: Mapping[str, SchedulerRow] = {name: each.row for name, each in _named(FLOW_SAMPLERS)}
"""Those of families of flow matching, by name."""

SCHEDULERS: Mapping[str, SchedulerRow] = {**NOISE_SCHEDULERS, **FLOW_SCHEDULERS}
"""Name -> class in diffusers, and options. A family draws with those of its noising (`sdflow.families.shared.noising`)."""

if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(SCHEDULERS)]


def parts_of(name: str) -> tuple[str, str]:
    """The sampler and the spacing ("": none) of one of SCHEDULERS."""
    found = _NAMED[name]
    return found.sampler, found.spacing


def requirements(name: str) -> tuple[str, ...]:
    """The distributions that one of SCHEDULERS needs besides those that everything drawn needs."""
    return _NAMED[name].needs


def make_scheduler(name: str, config: Config) -> Any:
    """diffusers' scheduler of one of SCHEDULERS, with the noise schedule of another one's config. Raises UsageError where a
    package is missing that it needs."""
    require_packages(f"the scheduler {name}", *requirements(name))
    cls, options = SCHEDULERS[name]
    try:
        return scheduler_class(cls).from_config(dict(config), **options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{name} cannot take over the settings of the pipeline's own scheduler: {error}") from error


@cache
def scheduler_class(name: str) -> Any:
    """diffusers' class of this name. What it draws comes from the generator of the call. Raises UsageError where a package is
    missing that it needs."""
    import diffusers

    needs = next((each.needs for each in SAMPLERS.values() if each.scheduler == name), ())
    require_packages(f"diffusers' {name}", *needs)
    found = getattr(diffusers, name)
    return with_drawn_noise(found) if name == _SDE else found


def prediction(config: Config, otherwise: str = "epsilon") -> str:
    """What a denoiser makes for a scheduler of this config, as diffusers calls it. otherwise: where the config does not
    say it; diffusers' schedulers of noise then take it for noise."""
    return str(config.get("prediction_type", otherwise))


_CONSISTENCY_ALONE = ("original_inference_steps", "timestep_scaling")
_CONSISTENCY = (
    *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("prediction_type", "timestep_spacing", "steps_offset", "set_alpha_to_one", "clip_sample", "clip_sample_range"),
    *("thresholding", "dynamic_thresholding_ratio", "sample_max_value", *_CONSISTENCY_ALONE),
)
"""The settings that LCM and TCD have."""


def renamed(config: Config, name: str) -> dict[str, Any]:
    """A scheduler's config as one of SCHEDULERS, with the same noise schedule. diffusers loads it without a word: the
    schedulers of ordinary models know each other's settings, those of consistency models only their own."""
    cls, options = SCHEDULERS[name]
    own = name in ("lcm", "tcd")
    kept = {
        key: value for key, value in config.items() if (key in _CONSISTENCY if own else key not in _CONSISTENCY_ALONE)
    }
    return {**kept, "_class_name": cls, **options}
