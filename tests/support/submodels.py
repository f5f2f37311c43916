"""The submodels of Stable Diffusion 1.x and 2.x, and their ports and made-up inputs by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdflow.families import FAMILIES
from sdflow.models.base import Model
from sdflow.models.ports import Ports, Sizes

FAMILY = FAMILIES["stable_diffusion"]
SUBMODELS = FAMILY.submodels


def model_of(submodel: str) -> Model:
    return FAMILY.part(submodel).model


def ports_of(submodel: str, config: Mapping[str, Any]) -> Ports:
    return model_of(submodel).ports(config)


def dummy_inputs(submodel: str, config: Mapping[str, Any], *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    return model_of(submodel).dummy(config, Sizes(**sizes), seed)
