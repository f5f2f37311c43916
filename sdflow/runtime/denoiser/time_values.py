"""What the timesteps give to the part of a denoiser that runs in every step (`sdflow.runtime.denoiser.split`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sdflow.errors import PassError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Bytes; kernels read several values at once."""


class TimeValues:
    """The inputs of a step's session that hold them, as slices of one piece of memory, so that one copy sets them all.

    tensors: by input.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], images: int) -> None:
        """inputs: tensors like them, in the order of a table's columns. images: how many bring timesteps of their own; the rows
        of each input are those of the images, one time or several. Raises PassError where they are of several types."""
        import torch

        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None
        if not inputs:
            return
        dtypes = {value.dtype for value in inputs.values()}
        if len(dtypes) != 1:
            raise PassError(f"the values of a timestep are of {len(dtypes)} types", where="split")
        (dtype,), (device, *_) = dtypes, [value.device for value in inputs.values()]
        step = ALIGNMENT // dtype.itemsize
        width = sum(value[0].numel() for value in inputs.values())
        picked, begin = [], 0
        for value in inputs.values():
            image = torch.arange(len(value)) % images
            index = image[:, None] * width + begin + torch.arange(value[0].numel())[None]
            picked.append(torch.nn.functional.pad(index.reshape(-1), (0, -value.numel() % step)))
            begin += value[0].numel()
        self._memory = torch.zeros(sum(map(len, picked)), dtype=dtype, device=device)
        self._picked = torch.cat(picked).to(device)  # which element of (images, width) goes where
        slots = self._memory.split([len(each) for each in picked])
        for (name, value), slot in zip(inputs.items(), slots, strict=True):
            self.tensors[name] = slot[: value.numel()].view(value.shape)

    def put(self, rows: torch.Tensor) -> None:
        """rows: (images, width), of tables."""
        import torch

        if self._memory is not None:
            torch.take(rows, self._picked, out=self._memory)


def table(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    """(steps, width) of what a schedule's timesteps give, (steps, ...) of each input, in the order of these names."""
    import torch

    return torch.cat([values[name].flatten(1) for name in names], dim=1) if names else torch.empty(0, 0)
