"""How a family's latents become noise, and the schedulers that take the noise away again.

`Diffusion` is that of Stable Diffusion 1.x, 2.x and XL: x_t = alpha_t x_0 + sigma_t noise, with a table of alphas, and
a model that predicts the noise, the velocity or the image (https://arxiv.org/abs/2006.11239, https://arxiv.org/abs/2202.00512).
`Flow` is that of
rectified flows: x_t = (1 - t) x_0 + t noise, and a model that predicts noise - x_0 (https://arxiv.org/abs/2209.03003,
https://arxiv.org/abs/2403.03206).

A method that takes a scheduler takes one of diffusers, after `set_timesteps` unless it says otherwise. Latents are
(..., rows, columns) of any type of number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from sdflow.errors import UsageError
from sdflow.families.schedulers import FLOW_SCHEDULERS, NOISE_SCHEDULERS, SchedulerRow

Tokens = int
"""Image tokens that the denoiser attends to: (rows / patch) * (columns / patch) of the latents. The schedule of some
flows depends on it."""


class Noising(Protocol):
    """schedulers: those that a pipeline of the family may be given by name."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]]

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        """What of the image's size the schedule depends on; None where it does not."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        """Give the scheduler so many steps, as the family's pipelines in diffusers do. strength: for those that spread
        their steps over what it leaves."""

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        """Give it so many steps by diffusers' own functions: what `set_timesteps` is held to. Raises ValueError for steps that
        the scheduler refuses."""

    def skipped(self, steps: int, strength: float) -> int:
        """How many of the steps an image that goes through this part of them (0 to 1) leaves out."""

    def first(self, scheduler: Any, noise: Any) -> Any:
        """The latents that a drawing from text alone begins with."""

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        """What the denoiser is given of the latents at a timestep."""

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        """Latents of an image with as much noise as there is at a timestep, of shape (1,)."""

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        """The image's latents, by what the denoiser makes of its input at a timestep."""


class Clean(NamedTuple):
    """Latents without noise as a sum: `given` times what the denoiser was given in a run, `output` times what it made
    of that, `after`
    times the latents behind the step, which stand for them where the scheduler does not say what the output means."""

    given: float
    output: float
    after: float


class Diffusion:
    """Noise by a table of alphas."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]] = NOISE_SCHEDULERS

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        return None

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        scheduler.set_timesteps(steps, **({} if strength is None else {"strength": strength}))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        scheduler.set_timesteps(steps)

    def skipped(self, steps: int, strength: float) -> int:
        """As diffusers' image to image: a strength of 0.8 leaves out the first fifth."""
        return steps - min(int(steps * strength), steps)

    def first(self, scheduler: Any, noise: Any) -> Any:
        return noise * scheduler.init_noise_sigma

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        return scheduler.scale_model_input(latents, timestep)

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        return scheduler.add_noise(image, noise, timestep)

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        """The UNet of these schedulers reads image * alpha + noise * sigma, of which the squares sum to 1
        (https://arxiv.org/abs/2010.02502, equation 12; of v https://arxiv.org/abs/2202.00512, appendix D)."""
        kind, alphas = scheduler.config.get("prediction_type"), getattr(scheduler, "alphas_cumprod", None)
        if alphas is None or kind not in ("epsilon", "sample", "v_prediction"):
            return Clean(0, 0, 1)
        if kind == "sample":
            return Clean(0, 1, 0)
        place, last = min(max(float(timestep), 0.0), len(alphas) - 1.0), len(alphas) - 1
        # As EulerDiscreteScheduler, sigma / alpha is linear between two timesteps.
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
    """How far diffusers' pipelines shift the steps of an image of so many tokens, as arguments of a scheduler's
    `set_timesteps`; none where its config does not say that it depends on the size."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    if not config.get("use_dynamic_shifting"):
        return {}
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    given = {name.replace("image_seq_len", "seq_len"): value for name in names if (value := config.get(name))}
    return {"mu": calculate_shift(tokens, **given)}


class Flow:
    """Straight lines from noise to image; a scheduler may shift its steps towards noise, the more the larger the image."""

    schedulers: ClassVar[Mapping[str, SchedulerRow]] = FLOW_SCHEDULERS

    def key(self, scheduler: Any, tokens: Tokens) -> int | None:
        return tokens if scheduler.config.get("use_dynamic_shifting") else None

    def set_timesteps(self, scheduler: Any, steps: int, tokens: Tokens, strength: float | None = None) -> None:
        config = scheduler.config
        options: dict[str, Any] = {}
        if config.get("use_dynamic_shifting"):
            options["mu"] = self.shift(config, tokens)
        if "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
            raise UsageError(
                f"{type(scheduler).__name__} is no scheduler of flow matching",
                where="scheduler",
                remedy=f"Take one of {', '.join(self.schedulers)}.",
            )
        scheduler.set_timesteps(steps, **options)

    def shift(self, config: Mapping[str, Any], tokens: Tokens) -> float:
        """`mu` of the scheduler: linear in the tokens, as `calculate_shift` of diffusers' pipelines."""
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        start, end = config.get("base_shift", 0.5), config.get("max_shift", 1.16)
        slope = (end - start) / (high - low)
        return float(tokens * slope + (start - slope * low))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: Tokens) -> None:
        """As StableDiffusion3Pipeline."""
        scheduler.set_timesteps(steps, **shift_of_diffusers(scheduler.config, tokens))

    def skipped(self, steps: int, strength: float) -> int:
        """As `get_timesteps` of diffusers' StableDiffusion3Img2ImgPipeline: what is left is rounded up."""
        return int(max(steps - min(steps * strength, steps), 0))

    def first(self, scheduler: Any, noise: Any) -> Any:
        return noise

    def scaled(self, scheduler: Any, latents: Any, timestep: Any) -> Any:
        return latents

    def noised(self, scheduler: Any, image: Any, noise: Any, timestep: Any) -> Any:
        """Of the timestep itself, wherever the scheduler stands: its `scale_noise` goes by the step that it takes next."""
        sigma = self._sigma(scheduler, timestep)
        return sigma * noise + (1.0 - sigma) * image

    def clean(self, scheduler: Any, timestep: Any) -> Clean:
        return Clean(1, -float(self._sigma(scheduler, timestep)), 0)

    def _sigma(self, scheduler: Any, timestep: Any) -> Any:
        """How much of the latents is noise at one of the scheduler's timesteps, 0 to 1."""
        found = (scheduler.timesteps == timestep).nonzero()
        return scheduler.sigmas[found[0].item()]


DIFFUSION, FLOW = Diffusion(), Flow()
