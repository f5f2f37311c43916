"""diffusers' AutoencoderKL, in two halves: pixels to latents, and back. Each is a graph of its own.

The encoder gives the mean of the latent distribution. Sampling in the graph could be neither seeded nor verified;
diffusers and optimum-onnx both take `latent_sample` as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Original, Shapes
from sdflow.models.ldm_names import ldm_vae_names
from sdflow.models.parameters import vae_parameters
from sdflow.models.vae_half import DecoderHalf, EncoderHalf, VaeHalf
from sdflow.models.working_memory import vae_values

if TYPE_CHECKING:
    import torch

_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""diffusers before 0.18 named the layers of attention so."""

_TRAINING = ("loss.", "model_ema.")
"""How names of tensors begin that only the training of a VAE reads (CompVis's latent-diffusion, ldm/models/autoencoder.py)."""


def image_reader(multiple: int, **options: bool) -> Any:
    """diffusers' reader of images for a VAE: PIL images and arrays to pixels in [-1, 1], their sizes multiples of this."""
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(vae_scale_factor=multiple, **options)


class _AutoencoderKL(VaeHalf):
    """Both halves are traced with diffusers' default attention, scaled_dot_product_attention. `fusion_attention_vae` of ONNX
    Runtime 1.31 does *not* match it: the older form fuses, but that fusion writes zeros in place of the biases of q, k
    and v."""

    class_name: ClassVar[str] = "AutoencoderKL"
    library_module: ClassVar[str | None] = "diffusers.models.autoencoders.autoencoder_kl"

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers import AutoencoderKL

        module: torch.nn.Module = AutoencoderKL.from_config(dict(config))
        return module

    def parameters(self, config: Config) -> Shapes | None:
        return vae_parameters(config)

    def distinguishing_shapes(self, config: Config) -> Shapes:
        channels = config["block_out_channels"]
        return {
            "encoder.conv_in.weight": (channels[0], config["in_channels"], 3, 3),
            "decoder.conv_in.weight": (channels[-1], config["latent_channels"], 3, 3),
            "decoder.up_blocks.0.resnets.0.conv1.weight": (channels[-1], channels[-1], 3, 3),
        }

    def current_name(self, name: str) -> str:
        parts = name.split(".")
        if len(parts) >= 2 and "attentions" in parts and parts[-2] in _OLD_ATTENTION:
            parts[-2] = _OLD_ATTENTION[parts[-2]]
        return ".".join(parts)

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        return {key: Original(name) for key, name in ldm_vae_names(keys).items()}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        """Files of a VAE alone keep what its training needed besides."""
        return name.startswith(_TRAINING)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        return vae_values(config, config["block_out_channels"], rows, columns)

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """The original layout and the oldest files hold attention as 1x1 convolutions: the same values."""
        return stored == shape or (len(shape) == 2 and stored == (*shape, 1, 1))


class VaeEncoder(EncoderHalf, _AutoencoderKL):
    """Pixels in [-1, 1] to the mean of the latents' distribution, not scaled."""

    unread = ("decoder", "post_quant_conv")

    def encode(self, module: Any, sample: Any) -> Any:
        return module.encode(sample, return_dict=False)[0].mode()

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"latent_sample": module.encode(inputs["sample"]).latent_dist.mode()}


class VaeDecoder(DecoderHalf, _AutoencoderKL):
    """Latents, not scaled, to pixels in about [-1, 1]."""

    unread = ("encoder", "quant_conv")
