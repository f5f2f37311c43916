"""The noise process of a family and the schedulers that reverse it.

`Diffusion` (Stable Diffusion 1.x, 2.x, XL): x_t = alpha_t x_0 + sigma_t noise with a table of alphas; the model predicts
noise, velocity or image (https://arxiv.org/abs/2006.11239, https://arxiv.org/abs/2202.00512).
`Flow` (rectified flow): x_t = (1 - t) x_0 + t noise; the model predicts noise - x_0
(https://arxiv.org/abs/2209.03003, https://arxiv.org/abs/2403.03206).

Schedulers are diffusers' own, after `set_timesteps` unless stated otherwise. Latents have shape (..., rows, columns) and any
floating-point type.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from sdflow.errors import UsageError
from sdflow.families.shared.schedulers import FLOW_SCHEDULERS, NOISE_SCHEDULERS, SchedulerRow

Tokens = int
"""Number of image tokens: (rows / patch) * (columns / patch) of the latents. Some flow schedules depend on it."""


class Noising(Protocol):
    """Methods that a noise process provides. schedulers: those selectable by name."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]]

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        """The token count if the schedule depends on it, else None. Part of the key under which schedules are cached."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        """Set the number of steps as the family's diffusers pipelines do. strength: for schedulers that spread their steps
        over the part that it leaves."""

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        """Set the number of steps by diffusers' own functions; `set_timesteps` is verified against this. Raises ValueError
        if the scheduler rejects the number."""

    def skipped(self, steps: int, strength: float) -> int:
        """How many initial steps image to image skips at this strength (0 to 1)."""

    def first(self, scheduler: Any, noise: Any) -> Any:
        """Initial latents for text to image, from standard normal noise of the same shape."""

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        """Latents as scaled for the denoiser's input at a timestep."""

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        """Image latents with the amount of noise of a timestep of shape (1,)."""

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        """Coefficients that recover the image latents from the denoiser's input and output at a timestep."""


class Clean(NamedTuple):
    """Denoised latents as a weighted sum of the denoiser's input, its output, and the latents after the step (used when the
    scheduler does not define what the output means)."""

    given: float
    output: float
    after: float


class Diffusion(Noising):
    """Noise according to a table of alphas."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]] = NOISE_SCHEDULERS

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        return None

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        scheduler.set_timesteps(steps, **({} if strength is None else {"strength": strength}))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        scheduler.set_timesteps(steps)

    def skipped(self, steps: int, strength: float) -> int:
        """As in diffusers' image to image: a strength of 0.8 skips the first fifth."""
        return steps - min(int(steps * strength), steps)

    def first(self, scheduler: Any, noise: Any) -> Any:
        return noise * scheduler.init_noise_sigma

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        return scheduler.scale_model_input(latents, timestep)

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        return scheduler.add_noise(image, noise, timestep)

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        """These schedulers' UNet reads image * alpha + noise * sigma, with squares that sum to 1
        (https://arxiv.org/abs/2010.02502, equation 12; for v https://arxiv.org/abs/2202.00512, appendix D)."""
        kind, alphas = scheduler.config.get("prediction_type"), getattr(scheduler, "alphas_cumprod", None)
        if alphas is None or kind not in ("epsilon", "sample", "v_prediction"):
            return Clean(0, 0, 1)
        if kind == "sample":
            return Clean(0, 1, 0)
        place, last = min(max(float(timestep), 0.0), len(alphas) - 1.0), len(alphas) - 1
        # As in EulerDiscreteScheduler, sigma / alpha is linear between two timesteps.
        low, high = (alphas[min(int(place) + more, last)].double() for more in (0, 1))
        noise = ((1 - low) / low) ** 0.5
        if part := place - int(place):
            noise = noise + part * (((1 - high) / high) ** 0.5 - noise)
        alpha = 1 / (noise**2 + 1) ** 0.5
        sigma = (1 - alpha**2) ** 0.5
        if kind == "v_prediction":
            return Clean(float(alpha), -float(sigma), 0)
        return Clean(float(1 / alpha), -float(sigma / alpha), 0)


def shift_of_diffusers(config: Mapping[str, Any], tokens: Tokens) -> dict[str, float]:
    """Keyword arguments of `set_timesteps` that hold the size-dependent shift, computed by diffusers; empty if the config
    does not enable dynamic shifting."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    if not config.get("use_dynamic_shifting"):
        return {}
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    given = {name.replace("image_seq_len", "seq_len"): value for name in names if (value := config.get(name))}
    return {"mu": calculate_shift(tokens, **given)}


def even_sigmas(steps: int) -> Any:
    """Return sigmas as FLUX's pipelines pass them to flow matching schedulers."""
    import numpy as np

    return np.linspace(1.0, 1 / steps, steps)


class Flow(Noising):
    """Rectified flow. Schedulers may shift steps towards noise, more for larger images."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]] = FLOW_SCHEDULERS

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        return tokens if scheduler.config.get("use_dynamic_shifting") else None

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        config = scheduler.config
        options: dict[str, Any] = {}
        if config.get("use_dynamic_shifting"):
            options["mu"] = self.shift(config, tokens)
        self.require_flow(scheduler)
        scheduler.set_timesteps(steps, **options)

    def require_flow(self, scheduler: Any) -> None:
        """Raises UsageError for a scheduler that does not step along sigmas."""
        if "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
            raise UsageError(
                f"{type(scheduler).__name__} is not a flow matching scheduler",
                where="scheduler",
                remedy=f"Use one of {', '.join(self.schedulers)}.",
            )

    def shift(self, config: Mapping[str, Any], tokens: Tokens) -> float:
        """Return the scheduler's `mu`, linear in the token count, like diffusers' `calculate_shift`."""
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        start, end = config.get("base_shift", 0.5), config.get("max_shift", 1.16)
        slope = (end - start) / (high - low)
        return float(tokens * slope + (start - slope * low))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        """As in StableDiffusion3Pipeline."""
        scheduler.set_timesteps(steps, **shift_of_diffusers(scheduler.config, tokens))

    def skipped(self, steps: int, strength: float) -> int:
        """As in `get_timesteps` of diffusers' StableDiffusion3Img2ImgPipeline: the remaining steps are rounded up."""
        return int(max(steps - min(steps * strength, steps), 0))

    def first(self, scheduler: Any, noise: Any) -> Any:
        return noise

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        return latents

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        """For the given timestep, independent of the scheduler's position, which its own `scale_noise` depends on."""
        sigma = self._sigma(scheduler, timestep)
        return sigma * noise + (1.0 - sigma) * image

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        return Clean(1, -float(self._sigma(scheduler, timestep)), 0)

    def _sigma(self, scheduler: Any, timestep: Any) -> Any:
        """Return the fraction of noise at one of the scheduler's timesteps, 0 to 1."""
        found = (scheduler.timesteps == timestep).nonzero()
        return scheduler.sigmas[found[0].item()]


DIFFUSION, FLOW = Diffusion(), Flow()
