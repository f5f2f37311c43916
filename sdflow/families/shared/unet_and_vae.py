"""Common parts of Stable Diffusion 1.x, 2.x and XL: UNet, VAE, their adapters, and the tensors that identify each."""

from __future__ import annotations

from collections.abc import Mapping

from sdflow.families.shared.part import Adapted, Layout, Part
from sdflow.models.base import Config
from sdflow.models.controlnet import ControlNet
from sdflow.models.image_encoder import PROJECTIONS, ImageEncoder, projection_adapter, projection_names
from sdflow.models.image_prompts import ADAPTED, adapter_of, matrix_names
from sdflow.models.residuals import CONTROLLED
from sdflow.models.unet import UNet
from sdflow.models.vae import VaeDecoder, VaeEncoder
from sdflow.models.vae_tiny import TinyVaeDecoder, TinyVaeEncoder

UNET_LAYOUT = Layout("model.diffusion_model.")
VAE_LAYOUT = Layout("first_stage_model.")
CONTROLNET = Part(
    "controlnet",
    ControlNet(),
    "controlnet",
    "A ControlNet, run before the denoiser. This chain applies to every net under `controlnets`.",
    layouts=(Layout("control_model."),),
)

OTHER_UNETS: Mapping[int, str] = {8: "a UNet of InstructPix2Pix", 5: "a depth-to-image UNet"}
"""Unsupported UNets that read further images with the latents: input channels -> description."""

IMAGE_MATRICES = Adapted(adapter_of, Layout("ip_adapter.", matrix_names), ADAPTED)
IMAGE_ENCODER = Part(
    "image_encoder",
    ImageEncoder(),
    "image_encoder",
    "The image prompt encoder with the projections of `ip_adapters`: an image to tokens for the denoiser.",
    adapted=Adapted(projection_adapter, Layout("image_proj.", projection_names), PROJECTIONS),
)
UNET = Part(
    "unet",
    UNet(),
    "unet",
    "The denoiser, run once per step.",
    layouts=(UNET_LAYOUT,),
    # diffusers' first LoRAs only have the UNet's attention processors, without a prefix.
    lora=("lora_unet_", "unet.", "diffusion_model.", "base_model.model.", ""),
    controlled={CONTROLLED: True},
    adapted=IMAGE_MATRICES,
)
VAE = (
    Part(
        "vae_encoder",
        VaeEncoder(),
        "vae",
        "Pixels to latents; needed for image-to-image only.",
        layouts=(VAE_LAYOUT,),
        instead=(TinyVaeEncoder(),),
    ),
    Part("vae_decoder", VaeDecoder(), "vae", "Latents to pixels.", layouts=(VAE_LAYOUT,), instead=(TinyVaeDecoder(),)),
)


def is_open_clip(text: Config) -> bool:
    """Whether a text encoder is OpenCLIP's, which uses Gelu instead of CLIP's QuickGelu."""
    return text.get("hidden_act") == "gelu"


def text_fingerprint(text: Config, clip: Layout, open_clip: Layout | None = None) -> dict[str, tuple[int, ...]]:
    """Return the tensors that identify a text encoder. Those in OpenCLIP's layout, if given, identify OpenCLIP's."""
    width, tokens, length = text["hidden_size"], text["vocab_size"], text["max_position_embeddings"]
    if open_clip is not None and is_open_clip(text):
        names = {"token_embedding.weight": (tokens, width), "positional_embedding": (length, width)}
        return {f"{open_clip.prefix}{name}": shape for name, shape in names.items()}
    names = {"token_embedding.weight": (tokens, width), "position_embedding.weight": (length, width)}
    return {f"{clip.prefix}embeddings.{name}": shape for name, shape in names.items()}


def unet_fingerprint(unet: Config) -> dict[str, tuple[int, ...] | None]:
    """Return the tensors that identify a UNet."""
    prefix, width, deepest = UNET_LAYOUT.prefix, unet["block_out_channels"][0], unet["block_out_channels"][-1]
    attention = "1.transformer_blocks.0.attn2.to_k.weight"
    # Index of the first attention: conv_in, then the layers of each level, with a downsampler between levels.
    level = next(index for index, kind in enumerate(unet["down_block_types"]) if kind.startswith("CrossAttn"))
    first = 1 + level * (unet["layers_per_block"] + 1)
    guidance = unet.get("time_cond_proj_dim")
    return {
        f"{prefix}time_embedding.cond_proj.weight": None if guidance is None else (width, guidance),
        f"{prefix}input_blocks.0.0.weight": (width, unet["in_channels"], 3, 3),
        f"{prefix}input_blocks.{first}.{attention}": (unet["block_out_channels"][level], unet["cross_attention_dim"]),
        f"{prefix}middle_block.{attention}": (deepest, unet["cross_attention_dim"]),
        f"{prefix}out.2.weight": (unet["out_channels"], width, 3, 3),
    }


def vae_fingerprint(vae: Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors that identify a VAE."""
    prefix = VAE_LAYOUT.prefix
    return {
        f"{prefix}encoder.conv_in.weight": (vae["block_out_channels"][0], vae["in_channels"], 3, 3),
        f"{prefix}decoder.conv_in.weight": (vae["block_out_channels"][-1], vae["latent_channels"], 3, 3),
    }


def projected_text_fingerprint(text: Config, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the tensors that identify SDXL's second text encoder, OpenCLIP's with a projection."""
    return {
        f"{layout.prefix}token_embedding.weight": (text["vocab_size"], text["hidden_size"]),
        f"{layout.prefix}text_projection": (text["hidden_size"], text["projection_dim"]),
    }
