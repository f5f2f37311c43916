"""diffusers' AutoencoderKL as two graphs: encoder (pixels to latents) and decoder (latents to pixels).

The encoder returns the mean of the latent distribution: sampling in the graph could be neither seeded nor verified.
diffusers and optimum-onnx both use `latent_sample` as it is.
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
"""Attention layer names in diffusers before 0.18."""

_TRAINING = ("loss.", "model_ema.")
"""Prefixes of tensors used only in VAE training (CompVis's latent-diffusion, ldm/models/autoencoder.py)."""


def image_reader(multiple: int, **options: bool) -> Any:
    """Return diffusers' image processor for a VAE: PIL images or arrays to pixels in [-1, 1], sizes rounded to
    `multiple`."""
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(vae_scale_factor=multiple, **options)


class _AutoencoderKL(VaeHalf):
    """Both halves use diffusers' default scaled_dot_product_attention. `fusion_attention_vae` of ONNX Runtime 1.31 does
    *not* match it: it fuses an older form, but with zeros in place of the biases of q, k and v."""

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
        """Ignore leftovers of VAE training."""
        return name.startswith(_TRAINING)

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        return vae_values(config, config["block_out_channels"], rows, columns)

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Accept attention stored as 1x1 convolutions, as in the original layout and the oldest files."""
        return stored == shape or (len(shape) == 2 and stored == (*shape, 1, 1))


class VaeEncoder(EncoderHalf, _AutoencoderKL):
    """Maps pixels in [-1, 1] to the mean of the latent distribution, unscaled."""

    unread = ("decoder", "post_quant_conv")

    def encode(self, module: Any, sample: Any) -> Any:
        return module.encode(sample, return_dict=False)[0].mode()

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"latent_sample": module.encode(inputs["sample"]).latent_dist.mode()}


class VaeDecoder(DecoderHalf, _AutoencoderKL):
    """Maps unscaled latents to pixels in about [-1, 1]."""

    unread = ("encoder", "quant_conv")
