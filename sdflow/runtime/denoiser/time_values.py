"""Time embeddings as inputs of a denoiser's step part (`sdflow.runtime.denoiser.split`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sdflow.errors import PassError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""In bytes; kernels use vectorized reads."""


class TimeValues:
    """The time inputs of a step's session, as slices of one buffer, so one copy sets them all.

    tensors: by input.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], images: int) -> None:
        """inputs: example tensors, in the order of a table's columns. images: number of images with their own
        timesteps; each input has their rows once or several times. Raises PassError if the inputs differ in type."""
        import torch

        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None
        if not inputs:
            return
        dtypes = {value.dtype for value in inputs.values()}
        if len(dtypes) != 1:
            raise PassError(f"time values have {len(dtypes)} different types", where="split")
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
        self._picked = torch.cat(picked).to(device)  # source index in (images, width) of each element
        slots = self._memory.split([len(each) for each in picked])
        for (name, value), slot in zip(inputs.items(), slots, strict=True):
            self.tensors[name] = slot[: value.numel()].view(value.shape)

    def put(self, rows: torch.Tensor) -> None:
        """Set the inputs. rows: (images, width), from tables."""
        import torch

        if self._memory is not None:
            torch.take(rows, self._picked, out=self._memory)


def table(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    """Return (steps, width): the outputs of the timestep part, (steps, ...) each, concatenated in the order of
    `names`."""
    import torch

    return torch.cat([values[name].flatten(1) for name in names], dim=1) if names else torch.empty(0, 0)
