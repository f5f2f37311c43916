"""Weights with LoRAs that several lanes draw with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sdflow.serve.engine.once import Once

if TYPE_CHECKING:
    import torch


class Values(dict[str, Mapping[str, "torch.Tensor"]]):
    """By submodel and name of the initializer; a dict that can be referred to weakly."""


class SharedValues(Once[Values]):
    """The weights of a pipeline by LoRAs. They stay for as long as a lane keeps them."""

    def __init__(self) -> None:
        super().__init__(WeakValueDictionary())
