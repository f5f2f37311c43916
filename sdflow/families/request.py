"""What is drawn, and what of it the denoiser takes. Tensors are torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.models.base import GUIDANCE, Config
from sdflow.prompts.reading import PLAIN, Reading

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Run = Callable[[str, Tensors], Tensors]
"""Runs a submodel, by its name, on inputs by name; gives its outputs by name."""


@dataclass(frozen=True)
class Request:
    """What is drawn: one entry of `prompts` and `negatives` for each image.

    negatives: None where the caller gave none. guidance_scale: up to 1 there is no guidance. height, width: of the image
    in pixels. guidance_width: of the embedding in which the denoiser takes the guidance scale; None: it takes none.
    more: what only some families take (`Family.arguments`), each None where the caller did not say it. reading: how the
    texts are read. denoiser: its config.
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
        """Whether there is classifier-free guidance: each image then takes two rows, the negative prompts' first."""
        return self.guidance_scale > 1 and self.guidance_width is None

    def require_no_negatives(self) -> None:
        """Raises UsageError where the caller gave negative prompts; for a model that takes the guidance scale as an input."""
        if self.negatives is not None:
            raise UsageError(
                "this model knows no negative prompt: guidance is an input of its denoiser",
                where="negative_prompt",
                remedy="Leave it out.",
            )

    def guidance_inputs(self) -> dict[str, torch.Tensor]:
        """The guidance scale as an input of the denoiser, a row for each image, where it takes it so."""
        if self.guidance_width is None:
            return {}
        return {GUIDANCE: guidance_embedding(self.guidance_scale, self.guidance_width).repeat(len(self.prompts), 1)}


@dataclass(frozen=True)
class Conditions:
    """What the denoiser takes beside latents and timestep: a row for each image, twice as many with guidance, then the
    negative prompts' first. halves: 2 with guidance, else 1."""

    inputs: Tensors
    halves: int

    def with_negatives_of(self, other: Conditions) -> Conditions:
        """These, with the rows of the negative prompts from there. Both with guidance, and of the same prompts."""
        import torch

        def joined(name: str, value: torch.Tensor) -> torch.Tensor:
            half = len(value) // 2
            return torch.cat([other.inputs[name][:half], value[half:]])

        return Conditions({name: joined(name, value) for name, value in self.inputs.items()}, self.halves)


def guidance_embedding(scale: float, width: int) -> torch.Tensor:
    """(1, width): sines and cosines of a guidance scale. Above 1 is what guidance adds, as the paper counts it.

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
