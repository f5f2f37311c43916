"""Selectable schedulers: a table of samplers, and one of step spacings.

A name is a sampler, optionally with a spacing: `dpm++_2m`, `dpm++_2m_karras`. To add a sampler, add a row. Command
options, fields of both HTTP APIs, workflow keys, image texts and the lists of A1111's API are derived from the rows
(`sdflow.families.shared.sampler_names` converts other programs' names).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from sdflow.errors import UsageError
from sdflow.families.shared.brownian import with_drawn_noise
from sdflow.machine.packages import require_packages
from sdflow.models.base import Config

SchedulerRow = tuple[str, Mapping[str, Any]]
"""A diffusers class, and its options."""


@dataclass(frozen=True)
class Spacing:
    """Spacing of the steps. options: of the scheduler. webui: A1111's label. others: further names in A1111, ComfyUI
    and InvokeAI.
    needs: required distributions."""

    options: Mapping[str, Any]
    webui: str
    others: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def _sigmas(kind: str) -> dict[str, bool]:
    """Return options that enable this kind only: diffusers accepts at most one."""
    return {f"use_{each}_sigmas": each == kind for each in ("karras", "exponential", "beta")}


SPACINGS: Mapping[str, Spacing] = {
    "trailing": Spacing({"timestep_spacing": "trailing"}, "SGM Uniform"),
    "karras": Spacing(_sigmas("karras"), "Karras", ("k",)),
    "exponential": Spacing(_sigmas("exponential"), "Exponential"),
    "beta": Spacing(_sigmas("beta"), "Beta", needs=("scipy",)),
}
"""Spacings by name. Without one, the pipeline's own scheduler config determines the steps."""

SIGMAS = ("karras", "exponential", "beta")
_ALL = tuple(SPACINGS)


@dataclass(frozen=True)
class Sampler:
    """A diffusers scheduler class with options. webui, comfyui, invokeai: names there; "": none. spacings: supported
    ones.
    automatic: default spacing in A1111's webui; "": none. needs: required distributions. runs: denoiser runs per step
    (diffusers' `order`)."""

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
"""Samplers of families with a table of alphas, by name."""

FLOW_SAMPLERS: Mapping[str, Sampler] = {
    "flow_euler": Sampler("FlowMatchEulerDiscreteScheduler", {}, "Euler", "euler", "euler", SIGMAS)
}
"""Samplers of flow matching families, by name."""

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
"""Schedulers of families with a table of alphas, by name."""

FLOW_SCHEDULERS: Mapping[str, SchedulerRow] = {name: each.row for name, each in _named(FLOW_SAMPLERS)}
"""Schedulers of flow matching families, by name."""

SCHEDULERS: Mapping[str, SchedulerRow] = {**NOISE_SCHEDULERS, **FLOW_SCHEDULERS}
"""Name -> diffusers class and options. A family supports those of its noising (`sdflow.families.shared.noising`)."""

if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(SCHEDULERS)]


def parts_of(name: str) -> tuple[str, str]:
    """Return the sampler and the spacing ("": none) of one of SCHEDULERS."""
    found = _NAMED[name]
    return found.sampler, found.spacing


def requirements(name: str) -> tuple[str, ...]:
    """Return the additional distributions that one of SCHEDULERS requires."""
    return _NAMED[name].needs


def make_scheduler(name: str, config: Config) -> Any:
    """Create one of SCHEDULERS with the noise schedule of another scheduler's config. Raises UsageError if a required
    package is missing."""
    require_packages(f"the scheduler {name}", *requirements(name))
    cls, options = SCHEDULERS[name]
    try:
        return from_config(scheduler_class(cls), config, **options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(
            f"{name} cannot use the settings of the pipeline's own scheduler: {error}",
            where="scheduler",
            remedy="Use another scheduler.",
        ) from error


def from_config(cls: Any, config: Config, **options: Any) -> Any:
    """Return `cls.from_config(config, **options)` of a diffusers scheduler, as a copy of an earlier one if possible: the
    constructors of KDPM2's schedulers search a table for each of 1,000 timesteps."""
    try:
        text = json.dumps([dict(config), options])
    except (TypeError, ValueError):  # tensors or arrays
        return _made(cls, config, options)
    return copy.deepcopy(_from_json(cls, text))


@lru_cache(maxsize=128)
def _from_json(cls: Any, text: str) -> Any:
    return _made(cls, *json.loads(text))


def _made(cls: Any, config: Config, options: Config) -> Any:
    """Return what diffusers' `from_config` does (0.42), which imports all schedulers and SciPy to learn which of the
    entries that this one ignores are another's."""
    default = {*config.get("_use_default_values", ()), "_use_default_values"}
    given = {name: value for name, value in config.items() if name not in default}
    taken = signature(cls.__init__).parameters.keys() - {"self", "kwargs"}
    own = {name: value for name, value in {**given, **options}.items() if name in taken}
    made = cls(**own)
    others = {name: value for name, value in given.items() if name not in own}
    if "_class_name" in others:
        others["_class_name"] = cls.__name__
    made.register_to_config(**others)
    return made


@cache
def scheduler_class(name: str) -> Any:
    """Return diffusers' class, changed if needed to draw its noise from the call's generator. Raises UsageError if a
    required package is missing."""
    import diffusers

    needs = next((each.needs for each in SAMPLERS.values() if each.scheduler == name), ())
    require_packages(f"diffusers' {name}", *needs)
    found = getattr(diffusers, name)
    return with_drawn_noise(found) if name == _SDE else found


VELOCITY = "flow"
"""What denoisers predict whose schedulers have no choice: the velocity of flow matching."""


def prediction(config: Config, otherwise: str = "epsilon") -> str:
    """Return what a denoiser predicts, as in scheduler configs. otherwise: default; diffusers' noise schedulers assume
    noise."""
    return str(config.get("prediction_type", otherwise))


_CONSISTENCY_ALONE = ("original_inference_steps", "timestep_scaling")
_CONSISTENCY = (
    *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("prediction_type", "timestep_spacing", "steps_offset", "set_alpha_to_one", "clip_sample", "clip_sample_range"),
    *("thresholding", "dynamic_thresholding_ratio", "sample_max_value", *_CONSISTENCY_ALONE),
)
"""Settings supported by LCM and TCD."""


def renamed(config: Config, name: str) -> dict[str, Any]:
    """Return a scheduler's config as one of SCHEDULERS, with the same noise schedule. diffusers loads it without
    warnings: ordinary schedulers accept each other's settings, consistency models' schedulers only their own."""
    cls, options = SCHEDULERS[name]
    own = name in ("lcm", "tcd")
    kept = {
        key: value for key, value in config.items() if (key in _CONSISTENCY if own else key not in _CONSISTENCY_ALONE)
    }
    return {**kept, "_class_name": cls, **options}
