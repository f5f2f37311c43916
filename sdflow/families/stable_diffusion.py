"""Stable Diffusion 1.x and 2.x: one text encoder, a UNet, a VAE, and in most of 1.x a safety checker.

2.x has the same classes with OpenCLIP's text encoder; its checkpoints with 768 pixels predict the velocity, which is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sdflow.families.base import Family
from sdflow.families.colors import STABLE_DIFFUSION, LatentColors
from sdflow.families.defaults import Defaults, Task
from sdflow.families.image_prompts import with_projections
from sdflow.families.part import Adapted, Companion, Layout, Part
from sdflow.families.request import Conditions, Request, Run
from sdflow.families.text import encode
from sdflow.models.base import Config
from sdflow.models.clip_text import ClipText
from sdflow.models.controlnet import ControlNet
from sdflow.models.image_encoder import ImageEncoder, projection_adapter, projection_names
from sdflow.models.image_prompts import adapter_of, matrix_names
from sdflow.models.open_clip_names import open_clip_names, open_clip_unused
from sdflow.models.residuals import CONTROLLED
from sdflow.models.safety_checker import SafetyChecker
from sdflow.models.unet import UNet
from sdflow.models.vae import VaeDecoder, VaeEncoder
from sdflow.models.vae_tiny import TinyVaeDecoder, TinyVaeEncoder

UNET_LAYOUT = Layout("model.diffusion_model.")
VAE_LAYOUT = Layout("first_stage_model.")
CONTROLNET = Part(
    "controlnet",
    ControlNet(),
    "controlnet",
    "A ControlNet, run beside the denoiser: this one chain is that of every net under `controlnets`.",
    layouts=(Layout("control_model."),),
)

IMAGE_MATRICES = Adapted(adapter_of, Layout("ip_adapter.", matrix_names))
IMAGE_ENCODER = Part(
    "image_encoder",
    ImageEncoder(),
    "image_encoder",
    "The encoder of image prompts, with what `ip_adapters` make of its embeddings: an image to tokens for the denoiser.",
    adapted=Adapted(projection_adapter, Layout("image_proj.", projection_names)),
)


class StableDiffusion(Family):
    name = "stable_diffusion"
    title = "Stable Diffusion 1.x and 2.x"
    classes = (
        *("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        *("StableDiffusionControlNetPipeline", "StableDiffusionControlNetImg2ImgPipeline"),
        "StableDiffusionControlNetInpaintPipeline",
    )
    parts = (
        Part(
            "text_encoder",
            ClipText(),
            "text_encoder",
            "The CLIP text model: token ids to embeddings.",
            read=lambda config: ("last_hidden_state",),
            layouts=(
                Layout("cond_stage_model.transformer."),
                Layout("cond_stage_model.model.", open_clip_names, open_clip_unused),  # 2.x
            ),
            lora=("lora_te_", "lora_te1_", "text_encoder.", "base_model.model.text_model.", "text_model."),
        ),
        Part(
            "unet",
            UNet(),
            "unet",
            "The denoiser, run once per step.",
            layouts=(UNET_LAYOUT,),
            # The first LoRAs of diffusers held the UNet's attention processors alone, without a prefix.
            lora=("lora_unet_", "unet.", "diffusion_model.", "base_model.model.", ""),
            controlled={CONTROLLED: True},
            adapted=IMAGE_MATRICES,
        ),
        Part(
            "vae_encoder",
            VaeEncoder(),
            "vae",
            "Pixels to latents; needed for image-to-image only.",
            layouts=(VAE_LAYOUT,),
            instead=(TinyVaeEncoder(),),
        ),
        Part(
            "vae_decoder",
            VaeDecoder(),
            "vae",
            "Latents to pixels.",
            layouts=(VAE_LAYOUT,),
            instead=(TinyVaeDecoder(),),
        ),
        Part(
            "safety_checker",
            SafetyChecker(),
            "safety_checker",
            "The filter of images; `null` or `false` leaves it out.",
            optional=True,
        ),
    )
    denoiser, decoder, encoder, checker = "unet", "vae_decoder", "vae_encoder", "safety_checker"
    net = CONTROLNET
    prompter = IMAGE_ENCODER
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": Companion("transformers", "CLIPTokenizer", "tokenizer_config.json"),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
        "feature_extractor": Companion(
            "transformers",
            "CLIPImageProcessor",
            "preprocessor_config.json",
            parts=("safety_checker", IMAGE_ENCODER.name),
        ),
    }
    scheduler_config: ClassVar[Mapping[str, Any]] = {"clip_sample": False, "steps_offset": 1}
    options: ClassVar[Mapping[str, Any]] = {}
    arguments = ()
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=50, guidance_scale=7.5),
        "image": Defaults(steps=50, guidance_scale=7.5, strength=0.8),
        "inpaint": Defaults(steps=50, guidance_scale=7.5, strength=1.0),
    }
    embeddings = ("prompt_embeds", "negative_prompt_embeds")
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION
    assembled_as: ClassVar[Mapping[Task, str]] = {
        "text": "OnnxStableDiffusionPipeline",
        "inpaint": "OnnxStableDiffusionInpaintPipeline",
    }
    architectures = (
        *("sd15", "sd15-tiny", "sd21", "sd21-base", "sd21-tiny", "sd-turbo", "sd-turbo-tiny"),
        *("sd15-inpainting", "sd15-inpainting-tiny", "sd2-inpainting", "sd2-inpainting-tiny"),
    )

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return {
            **unet_fingerprint(configs["unet"]),
            **vae_fingerprint(configs["vae"]),
            **text_fingerprint(configs["text_encoder"], *self.part("text_encoder").layouts),
        }

    def title_of(self, configs: Mapping[str, Config]) -> str:
        text = configs.get("text_encoder")
        if text is None:
            return self.title
        return "Stable Diffusion 2.x" if is_open_clip(text) else "Stable Diffusion 1.x"

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        text = configs.get("text_encoder")
        return "stable_diffusion_2" if text is not None and is_open_clip(text) else "stable_diffusion_1"

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        if request.guidance_width is not None:
            request.require_no_negatives()
        texts = list(request.prompts)
        if request.guided:
            texts = [*(request.negatives or [""] * len(texts)), *texts]
        encoded = encode(run, request.reading, {"text_encoder": (companions["tokenizer"], texts)})["text_encoder"]
        inputs = {"encoder_hidden_states": encoded.hidden("last_hidden_state"), **request.guidance_inputs()}
        return Conditions(inputs, halves=2 if request.guided else 1)

    def lora_loader(self) -> Any:
        import diffusers

        return diffusers.StableDiffusionPipeline

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        nets = [modules[name] for name in self.nets(modules).values()]
        make = diffusers.StableDiffusionControlNetPipeline if nets else diffusers.StableDiffusionPipeline
        if "unet" in modules and self.task({"unet": modules["unet"].config}) == "inpaint":
            make = diffusers.StableDiffusionInpaintPipeline
        pipeline = make(
            **{name: modules.get(name) for name in ("vae", "text_encoder", "unet", "image_encoder")},
            **({"controlnet": nets} if nets else {}),
            tokenizer=companions["tokenizer"],
            scheduler=companions["scheduler"],
            safety_checker=modules.get("safety_checker"),
            feature_extractor=companions.get("feature_extractor"),
            requires_safety_checker="safety_checker" in modules,
        )
        return with_projections(pipeline)


def is_open_clip(text: Config) -> bool:
    """Whether a text encoder is OpenCLIP's: it has Gelu where CLIP has QuickGelu."""
    return text.get("hidden_act") == "gelu"


def text_fingerprint(text: Config, clip: Layout, open_clip: Layout | None = None) -> dict[str, tuple[int, ...]]:
    """The tensors that tell one text encoder from another. Those of OpenCLIP's layout, if there is one, are OpenCLIP's."""
    width, tokens, length = text["hidden_size"], text["vocab_size"], text["max_position_embeddings"]
    if open_clip is not None and is_open_clip(text):
        names = {"token_embedding.weight": (tokens, width), "positional_embedding": (length, width)}
        return {f"{open_clip.prefix}{name}": shape for name, shape in names.items()}
    names = {"token_embedding.weight": (tokens, width), "position_embedding.weight": (length, width)}
    return {f"{clip.prefix}embeddings.{name}": shape for name, shape in names.items()}


def unet_fingerprint(unet: Config) -> dict[str, tuple[int, ...] | None]:
    """The tensors that tell one UNet from another."""
    prefix, width, deepest = UNET_LAYOUT.prefix, unet["block_out_channels"][0], unet["block_out_channels"][-1]
    attention = "1.transformer_blocks.0.attn2.to_k.weight"
    # The first place with attention: behind conv_in, each level has its layers and, between levels, one that halves.
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
    """The tensors that tell one VAE from another."""
    prefix = VAE_LAYOUT.prefix
    return {
        f"{prefix}encoder.conv_in.weight": (vae["block_out_channels"][0], vae["in_channels"], 3, 3),
        f"{prefix}decoder.conv_in.weight": (vae["block_out_channels"][-1], vae["latent_channels"], 3, 3),
    }
