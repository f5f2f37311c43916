"""Waits at the end of a drawing: for values from the device, and for CPU work.

A generator yields a `Fetch` or `Compute` and receives the result. A single call performs each wait itself (`complete`);
a server generates other images meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sdflow.runtime.sessions.place import Place

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Fetch:
    """Request values in host memory, received as a list."""

    place: Place
    values: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Compute:
    """Request CPU work; its return value is received."""

    work: Callable[[], Any]


Waits = Generator[Fetch | Compute, Any, Result]


def complete(waits: Waits[Result]) -> Result:
    """Perform all waits and return the generator's result."""
    try:
        wait = next(waits)
        while True:
            found = wait.work() if isinstance(wait, Compute) else [value.cpu() for value in wait.values]
            wait = waits.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result
