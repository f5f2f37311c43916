"""What to draw, and the denoiser inputs derived from it. Tensors are torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.models.base import Config
from sdflow.models.ports import GUIDANCE
from sdflow.prompts.reading import PLAIN, Reading

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Run = Callable[[str, Tensors], Tensors]
"""run(submodel, inputs by name) -> outputs by name."""


@dataclass(frozen=True)
class Request:
    """A batch of images to draw: one prompt and one negative prompt per image.

    negatives: None if not given. guidance_scale: no guidance at 1 or below. height, width: of the image, in pixels.
    guidance_width: width of the guidance embedding that the denoiser takes; None: it takes none. more: family-specific
    arguments (`Family.arguments`), None where not given. reading: prompt syntax. denoiser: its config.
    """

    prompts: Sequence[str]
    negatives: Sequence[str] | None
    guidance_scale: float
    height: int
    width: int
    guidance_width: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    reading: Reading = PLAIN
    denoiser: Config = field(default_factory=dict)

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance applies: two rows per image, the negative prompts' first."""
        return self.guidance_scale > 1 and self.guidance_width is None

    def require_no_negatives(self) -> None:
        """Raises UsageError for negative prompts. For models that take the guidance scale as an input."""
        if self.negatives is not None:
            raise UsageError(
                "this model has no negative prompt: its denoiser takes the guidance scale as an input",
                where="negative_prompt",
                remedy="Remove it.",
            )

    def guidance_inputs(self) -> dict[str, torch.Tensor]:
        """The embedded guidance scale, (images, guidance_width), if the denoiser takes it; else nothing."""
        if self.guidance_width is None:
            return {}
        return {GUIDANCE: guidance_embedding(self.guidance_scale, self.guidance_width).repeat(len(self.prompts), 1)}


@dataclass(frozen=True)
class Conditions:
    """Denoiser inputs besides latents and timestep: one row per image; with guidance two, the negative prompts' first.

    halves: 2 with guidance, else 1.
    """

    inputs: Tensors
    halves: int

    def with_negatives_of(self, other: Conditions) -> Conditions:
        """These conditions with `other`'s rows for the negative prompts. Both must have guidance and the same prompts."""
        import torch

        def joined(name: str, value: torch.Tensor) -> torch.Tensor:
            half = len(value) // 2
            return torch.cat([other.inputs[name][:half], value[half:]])

        return Conditions({name: joined(name, value) for name, value in self.inputs.items()}, self.halves)


def guidance_embedding(scale: float, width: int) -> torch.Tensor:
    """Sinusoidal embedding of a guidance scale, shape (1, width). The scale minus 1 is embedded, as in the paper.

    After diffusers' StableDiffusionPipeline.get_guidance_scale_embedding; https://arxiv.org/abs/2310.04378, section 4.3.
    """
    import torch

    half = width // 2
    step = torch.log(torch.tensor(10000.0)) / (half - 1)  # in float32 throughout: angles are in the thousands
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
    excess = torch.as_tensor(scale - 1.0, dtype=torch.float32).reshape(1)  # a scale that is traced stays an input
    angles = (excess * 1000.0)[:, None] * frequencies[None]
    embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(embedding, (0, width - 2 * half))
