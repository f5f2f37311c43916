"""diffusers' AutoencoderTiny (TAESD, https://github.com/madebyollin/taesd) in place of the VAE: 1.2 million parameters a half.

It decodes fast and a little less sharply. Its latents are those that the denoiser takes, scaled by 1, and its encoder gives
them themselves, no distribution. `scale_latents` of diffusers, which keeps them as bytes, is no part of any pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Port, Ports, Shapes, Sizes, halved

if TYPE_CHECKING:
    import torch


class _Half(Model):
    class_name: ClassVar[str] = "AutoencoderTiny"
    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    quick: ClassVar[bool] = True
    library_module: ClassVar[str | None] = "diffusers.models.autoencoders.autoencoder_tiny"

    def empty(self, config: Config) -> torch.nn.Module:
        from diffusers import AutoencoderTiny

        # diffusers writes block_out_channels into the config for its pipelines; the class itself does not take it.
        own = {name: value for name, value in config.items() if name != "block_out_channels"}
        module: torch.nn.Module = AutoencoderTiny.from_config(own)
        return module

    def scale(self, config: Config) -> int:
        return halved(config)

    def smallest(self, config: Config) -> Sizes:
        deepest = 2 * halved(config)
        return Sizes(batch=2, height=deepest, width=deepest)

    def telling(self, config: Config) -> Shapes:
        encoder, decoder = config["encoder_block_out_channels"], config["decoder_block_out_channels"]
        return {
            "encoder.layers.0.weight": (encoder[0], config["in_channels"], 3, 3),
            "decoder.layers.0.weight": (decoder[0], config["latent_channels"], 3, 3),
        }


class TinyVaeEncoder(_Half):
    """Pixels in [-1, 1] to latents."""

    def ports(self, config: Config) -> Ports:
        latents = ("batch", config["latent_channels"], "latent_height", "latent_width")
        return Ports(
            inputs=(Port("sample", "float32", ("batch", config["in_channels"], "height", "width")),),
            outputs=(Port("latent_sample", "float32", latents),),
        )

    def traced(self, module: Any) -> None:
        module.decoder = None

        def forward(sample: Any) -> Any:
            return module.encode(sample, return_dict=False)[0]

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"latent_sample": module.encode(inputs["sample"]).latents}

    def fed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"sample": args[0]}


class TinyVaeDecoder(_Half):
    """Latents to pixels in about [-1, 1]."""

    def ports(self, config: Config) -> Ports:
        latents = ("batch", config["latent_channels"], "latent_height", "latent_width")
        return Ports(
            inputs=(Port("latent_sample", "float32", latents),),
            outputs=(Port("sample", "float32", ("batch", config["out_channels"], "height", "width")),),
        )

    def traced(self, module: Any) -> None:
        module.encoder = None

        def forward(latent_sample: Any) -> Any:
            return module.decode(latent_sample, return_dict=False)[0]

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sample": module.decode(inputs["latent_sample"]).sample}

    def fed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"latent_sample": args[0]}
