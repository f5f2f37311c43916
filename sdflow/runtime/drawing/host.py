"""What a pipeline's call waits for behind its last step: values of the device, and work of the processor.

A call alone waits there. A server puts something of its own here, and draws other images meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class Host:
    """Waits for everything."""

    def fetch(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These values in the processor's memory."""
        return [value.cpu() for value in values]

    def compute(self, work: Callable[[], Result]) -> Result:
        """What this gives, which uses the processor alone."""
        return work()
