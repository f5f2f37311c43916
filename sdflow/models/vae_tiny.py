"""diffusers' AutoencoderTiny (TAESD, https://github.com/madebyollin/taesd), a VAE with 1.2 million parameters per half.

It decodes quickly and slightly less sharply. Its latents are already in the denoiser's scale (factor 1), and its
encoder is deterministic. diffusers' `scale_latents`, which stores them as bytes, is not used by any pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Original, Shapes
from sdflow.models.more_parameters import tiny_vae_parameters
from sdflow.models.vae_half import DecoderHalf, EncoderHalf, VaeHalf
from sdflow.models.working_memory import vae_values

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")


class _AutoencoderTiny(VaeHalf):
    class_name: ClassVar[str] = "AutoencoderTiny"
    quick: ClassVar[bool] = True
    reads: ClassVar[str]
    library_module: ClassVar[str | None] = "diffusers.models.autoencoders.autoencoder_tiny"

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers import AutoencoderTiny

        # diffusers writes block_out_channels into the config for its pipelines; the class itself does not take it.
        own = {name: value for name, value in config.items() if name != "block_out_channels"}
        module: torch.nn.Module = AutoencoderTiny.from_config(own)
        return module

    def graph_parameters(self, config: Config) -> Shapes | None:
        return tiny_vae_parameters(config, self.reads)

    def distinguishing_shapes(self, config: Config) -> Shapes:
        encoder, decoder = config["encoder_block_out_channels"], config["decoder_block_out_channels"]
        return {
            "encoder.layers.0.weight": (encoder[0], config["in_channels"], 3, 3),
            "decoder.layers.0.weight": (decoder[0], config["latent_channels"], 3, 3),
        }

    def halves(self, config: Config) -> Mapping[str, Shapes]:
        first, latents = self.distinguishing_shapes(config), config["latent_channels"]
        last = sum(1 + blocks for blocks in config["num_encoder_blocks"])  # encoders for other latents only differ here
        encoder, decoder = (config[f"{half}_block_out_channels"] for half in ("encoder", "decoder"))
        shapes = {
            **first,
            "encoder.layers.1.conv.0.weight": (encoder[0], encoder[0], 3, 3),
            f"encoder.layers.{last}.weight": (latents, encoder[-1], 3, 3),
            "decoder.layers.2.conv.0.weight": (decoder[0], decoder[0], 3, 3),
        }
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, original in self.original_names(shapes).items():
            half, _, name = original.name.partition(".")
            found.setdefault(half, {})[name] = shapes[key]
        return found

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        return vae_values({"mid_block_add_attention": False}, config["decoder_block_out_channels"], rows, columns)

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        """As in the authors' taesd.py: two plain sequences; the decoder's also includes what diffusers does outside of
        it."""
        return {key: Original(_LAYER.sub(_as_in_a_sequence, key)) for key in keys}


def _as_in_a_sequence(found: re.Match[str]) -> str:
    half, index = found[1], int(found[2])
    return f"{half}.{index + (half == 'decoder')}."


class TinyVaeEncoder(EncoderHalf, _AutoencoderTiny):
    """Maps pixels in [-1, 1] to latents."""

    unread = ("decoder",)
    reads = "encoder"

    def encode(self, module: Any, sample: Any) -> Any:
        return module.encode(sample, return_dict=False)[0]

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"latent_sample": module.encode(inputs["sample"]).latents}


class TinyVaeDecoder(DecoderHalf, _AutoencoderTiny):
    """Maps latents to pixels in about [-1, 1]."""

    unread = ("encoder",)
    reads = "decoder"
