"""Reference images: images that a denoiser reads beside the prompt, as further tokens, to edit or combine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sdflow.models.base import Config

if TYPE_CHECKING:
    import torch

    from sdflow.families.shared.request import Tensors

REFERENCES = "references"
"""The argument of a call that takes them."""
REFERENCE_TOKENS = "reference_tokens"
"""The axis of a denoiser's inputs that holds the tokens of all reference images."""
MOST_REFERENCES = 8
"""Images of one call. diffusers sets no limit; each adds up to 4,096 tokens to every step."""


class References(Protocol):
    """How a family's denoiser reads reference images.

    Built graphs read none: `extend` adds the inputs when a graph is loaded, so a pipeline folder serves both kinds of calls.
    """

    def extend(self, graph: Any) -> None:
        """Add the inputs for reference images to a denoiser's ModelProto. Raises UsageError for a graph that was changed so
        that the places are not found."""

    def config(self, denoiser: Config) -> Config:
        """The denoiser's config for a graph that was extended: its model's ports include the added inputs."""

    def size(self, width: int, height: int, multiple: int) -> tuple[int, int]:
        """Height and width that an image of this size is read at. multiple: of which both must be multiples."""

    def pixels(self, image: Any, multiple: int) -> torch.Tensor:
        """An image as the VAE encoder reads it, (1, 3, height, width) in [-1, 1]. Raises UsageError for one that the model does
        not take."""

    def inputs(self, latents: Sequence[torch.Tensor], rows: int) -> Tensors:
        """The added inputs for encoded images, each (1, channels, rows, columns). rows: the denoiser's batch."""

    def by_diffusers(self, module: Any, inputs: Tensors, latents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs by name of the denoiser's module for inputs by name, without the added ones, and encoded images, by diffusers'
        own functions: what an extended graph is verified against."""

    def of_diffusers(self, images: Sequence[Any]) -> dict[str, Any]:
        """Arguments of a call of diffusers' pipeline with these images as references."""


def token_count(latents: Sequence[torch.Tensor]) -> int:
    """Number of tokens of encoded images, one for each latent pixel."""
    return sum(each.shape[2] * each.shape[3] for each in latents)


def with_references(size: tuple[int, int], tokens: int) -> tuple[int, int]:
    """Rows and columns of latents that have as many tokens as latents of this size together with reference images, for estimates
    of memory. tokens: of the references."""
    rows, columns = size
    return rows + -(-tokens // columns), columns
