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
from sdflow.families.part import Companion, Layout, Part
from sdflow.families.request import Conditions, Request, Run
from sdflow.families.shared_parts import (
    CONTROLNET,
    IMAGE_ENCODER,
    UNET,
    VAE,
    is_open_clip,
    text_fingerprint,
    unet_fingerprint,
    vae_fingerprint,
)
from sdflow.families.text import encode
from sdflow.models.base import Config
from sdflow.models.clip_text import ClipText
from sdflow.models.open_clip_names import open_clip_names, open_clip_unused
from sdflow.models.safety_checker import SafetyChecker


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
            lora=(
                *("lora_te_", "lora_te1_", "text_encoder.", "text_model."),
                *("base_model.model.text_model.", "base_model.model.encoder.layers."),
            ),
        ),
        UNET,
        *VAE,
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
