"""Weights with LoRAs that several lanes draw with: whoever asks first computes them, the others wait for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sdflow.serve.jobs import LoraFile

if TYPE_CHECKING:
    import torch


class Values(dict[str, Mapping[str, "torch.Tensor"]]):
    """By submodel and name of the initializer; a dict that can be referred to weakly."""


class SharedValues:
    """The weights of a pipeline by LoRAs. They stay for as long as a lane keeps them. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: WeakValueDictionary[tuple[LoraFile, ...], Values] = WeakValueDictionary()
        self._coming: dict[tuple[LoraFile, ...], Future[Values]] = {}

    def get(self, loras: tuple[LoraFile, ...], compute: Callable[[], Values]) -> Values:
        """The values with these LoRAs. Raises what `compute` raises, each time anew."""
        with self._lock:
            there, coming = self._there.get(loras), self._coming.get(loras)
            if there is not None:
                return there
            if first := coming is None:
                coming = self._coming[loras] = Future()
        if first:
            self._compute(loras, coming, compute)
        return coming.result()

    def _compute(self, loras: tuple[LoraFile, ...], coming: Future[Values], compute: Callable[[], Values]) -> None:
        try:
            values = compute()
        except BaseException as error:
            with self._lock:
                del self._coming[loras]
            coming.set_exception(error)
            raise
        with self._lock:
            self._there[loras] = values
            del self._coming[loras]
        coming.set_result(values)
