"""The schedulers that tests of whole images draw with: every sampler, and every spacing of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sdflow.families.shared.schedulers import NOISE_SCHEDULERS, parts_of, requirements
from sdflow.machine.packages import missing

OF_SD = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "clip_sample": False,
    "set_alpha_to_one": False,
}
"""The configuration of Stable Diffusion 1.5's scheduler."""


def params(names: Iterable[str]) -> list[Any]:
    """Of `pytest.mark.parametrize`: those that need a package that is not installed are skipped."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(absent), reason=f"pip install {' '.join(absent)}"))
        for name in names
        for absent in [missing(*requirements(name))]
    ]


EVERY = params(NOISE_SCHEDULERS)
"""All names."""

SAMPLERS = params(name for name in NOISE_SCHEDULERS if not parts_of(name)[1] or parts_of(name)[0] in ("euler", "heun"))
"""Each sampler, and two of them with every spacing: the spacings are one function in diffusers, copied into each class."""
