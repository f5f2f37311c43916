"""Reference images: images that a denoiser reads as additional tokens, to edit or combine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sdflow.models.base import Config

if TYPE_CHECKING:
    import torch

    from sdflow.families.shared.request import Tensors

REFERENCES = "references"
"""Name of the call's argument."""
REFERENCE_TOKENS = "reference_tokens"
"""Axis of a denoiser's inputs with the tokens of all reference images."""
MOST_REFERENCES = 8
"""Maximum per call. diffusers sets no limit; each image adds up to 4,096 tokens to every step."""


class References(Protocol):
    """How a family's denoiser reads reference images.

    Built graphs have no inputs for them: `extend` adds these when a graph is loaded, so a pipeline folder serves both
    kinds of calls.
    """

    def extend(self, graph: Any) -> None:
        """Add the inputs for reference images to a denoiser's ModelProto. Raises UsageError if the graph's form does
        not match."""

    def config(self, denoiser: Config) -> Config:
        """Return the denoiser's config for an extended graph, so that its model's ports include the added inputs."""

    def size(self, width: int, height: int, multiple: int) -> tuple[int, int]:
        """Return the height and width at which an image of this size is read. multiple: both are multiples of it."""

    def pixels(self, image: Any, multiple: int) -> torch.Tensor:
        """Return an image as the VAE encoder's input, (1, 3, height, width) in [-1, 1]. Raises UsageError for
        unsupported images."""

    def inputs(self, latents: Sequence[torch.Tensor], rows: int) -> Tensors:
        """Return the added inputs for encoded images, each (1, channels, rows, columns). rows: the denoiser's batch
        size."""

    def by_diffusers(self, module: Any, inputs: Tensors, latents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the denoiser module's outputs by name with diffusers' own functions, from inputs by name (without the
        added ones) and encoded images. Extended graphs are verified against this."""

    def of_diffusers(self, images: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of diffusers' pipeline call for these reference images."""


def token_count(latents: Sequence[torch.Tensor]) -> int:
    """Return the number of tokens of encoded images, one per latent pixel."""
    return sum(each.shape[2] * each.shape[3] for each in latents)


def with_references(size: tuple[int, int], tokens: int) -> tuple[int, int]:
    """Return rows and columns of latents with as many tokens as latents of this size plus reference images, for memory
    estimates.
    tokens: of the references."""
    rows, columns = size
    return rows + -(-tokens // columns), columns
