"""Brownian motion for SDE schedulers, drawn from the call's generator.

Each step, diffusers' DPMSolverSDEScheduler requests the increments of a Brownian motion over two intervals; the first
is the beginning of the second. By default they come from a tree seeded by PyTorch's global generator, so the call's
generators and seeds have no effect. The joint distribution of the increments is that of sums of independent normal
variables (https://arxiv.org/abs/2001.01328, section 4), which are drawn here on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError

if TYPE_CHECKING:
    import torch


class BrownianPath:
    """W(next) - W(sigma), divided by the root of the interval's length, for intervals that follow or extend each other.

    draw: returns standard normal values, independent at each call.
    """

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        self._draw = draw
        self._begin: float | None = None
        self._reached = 0.0
        self._walked: Any = 0.0

    def __call__(self, sigma: Any, sigma_next: Any) -> torch.Tensor:
        """sigma, sigma_next: ends of the interval, as numbers or single-element tensors."""
        begin, end = float(sigma), float(sigma_next)
        if begin != self._begin:
            self._begin, self._reached, self._walked = begin, begin, 0.0
        if not begin >= self._reached > end:
            raise UsageError(f"a step from sigma {self._reached:g} to {end:g} does not remove noise")
        self._walked = self._walked + (self._reached - end) ** 0.5 * self._draw()
        self._reached = end
        found: torch.Tensor = self._walked / (begin - end) ** 0.5
        return found


def with_drawn_noise(scheduler: type) -> type:
    """Return a subclass of a diffusers scheduler whose `step` takes a generator, as diffusers' pipelines pass it."""
    from diffusers.utils.torch_utils import randn_tensor

    def step(
        self: Any,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        s_noise: float = 1.0,
    ) -> Any:
        def draw() -> torch.Tensor:
            return randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)

        if self.noise_sampler is None:
            self.noise_sampler = BrownianPath(draw)
        return scheduler.step(self, model_output, timestep, sample, return_dict, s_noise)  # type: ignore[attr-defined]

    return type(scheduler.__name__, (scheduler,), {"step": step, "__module__": scheduler.__module__})
