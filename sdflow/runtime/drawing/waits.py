"""What a drawing waits for behind its last step: values on their way from the device, and work of the processor.

It is said, not done: a generator gives a `Fetch` or a `Compute` and is sent what came of it. A call alone waits for each
(`complete`); a server draws other images meanwhile.
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
    """Values of a place, wanted in the processor's memory: sent back as a list."""

    place: Place
    values: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Compute:
    """Work that uses the processor alone: what it returns is sent back."""

    work: Callable[[], Any]


Waits = Generator[Fetch | Compute, Any, Result]


def complete(waits: Waits[Result]) -> Result:
    """What the generator returns, with each wait waited for."""
    try:
        wait = next(waits)
        while True:
            found = wait.work() if isinstance(wait, Compute) else [value.cpu() for value in wait.values]
            wait = waits.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result
