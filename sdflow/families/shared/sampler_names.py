"""What other programs call the schedulers: A1111's webui its samplers, InvokeAI its schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdflow.families.shared.schedulers import SCHEDULERS

TRAILING = "_trailing"
"""How the names of schedulers end whose timesteps are spaced so."""

SAMPLERS = {
    "Euler": "euler",
    "Euler a": "euler_a",
    "DDIM": "ddim",
    "DPM++ 2M": "dpm++_2m",
    "UniPC": "unipc",
    "LCM": "lcm",
    "PLMS": "pndm",
    "TCD": "tcd",
}
"""What the webui calls a sampler -> the scheduler."""

SGM_UNIFORM = "SGM Uniform"
"""What the webui calls the schedule of trailing timesteps."""

INVOKEAI = {
    "euler": "euler",
    "euler_a": "euler_a",
    "ddim": "ddim",
    "dpmpp_2m": "dpm++_2m",
    "unipc": "unipc",
    "lcm": "lcm",
    "pndm": "pndm",
    "tcd": "tcd",
}
"""What InvokeAI calls a scheduler -> the scheduler."""


def scheduler_name(scheduler: Any) -> str | None:
    """The name in `SCHEDULERS` of one of diffusers' schedulers; None where its class, or how it is set, has none."""
    config = scheduler.config
    fitting = [
        (len(options), name)
        for name, (cls, options) in SCHEDULERS.items()
        if cls == type(scheduler).__name__ and all(config.get(key) == value for key, value in options.items())
    ]
    return max(fitting)[1] if fitting else None


def name_elsewhere(name: str, names: Mapping[str, str]) -> str | None:
    """What another program calls a scheduler. names: `SAMPLERS` or `INVOKEAI`. None where it has none such."""
    plain = name.removesuffix(TRAILING).removeprefix("flow_")
    return next((theirs for theirs, ours in names.items() if ours == plain), None)
