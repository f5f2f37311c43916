"""Common code of families with one CLIP text encoder: Stable Diffusion 1.x and 2.x, and their distilled models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sdflow.families.shared.base import Family
from sdflow.families.shared.part import CLIP_TOKENIZER, Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import encode
from sdflow.families.shared.unet_and_vae import (
    IMAGE_ENCODER,
    UNET,
    VAE,
    is_open_clip,
    text_fingerprint,
    unet_fingerprint,
    vae_fingerprint,
)
from sdflow.models.base import Config
from sdflow.models.clip_text import ClipText
from sdflow.models.open_clip_names import open_clip_names, open_clip_unused
from sdflow.models.safety_checker import SafetyChecker

PARTS: tuple[Part, ...] = (
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
        "The image filter; `null` or `false` omits it.",
        optional=True,
    ),
)
COMPANIONS: Mapping[str, Companion] = {
    "tokenizer": CLIP_TOKENIZER,
    "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    "feature_extractor": Companion(
        "transformers", "CLIPImageProcessor", "preprocessor_config.json", parts=("safety_checker", IMAGE_ENCODER.name)
    ),
}


class OneClip(Family):
    """A family with whatever only depends on the text encoder, the UNet and the VAE."""

    parts = PARTS
    denoiser, decoder, encoder, checker = "unet", "vae_decoder", "vae_encoder", "safety_checker"
    companions: ClassVar[Mapping[str, Companion]] = COMPANIONS
    embeddings = ("prompt_embeds", "negative_prompt_embeds")

    def built(self, make: Any, modules: Mapping[str, Any], companions: Mapping[str, Any], **more: Any) -> Any:
        """Return a diffusers pipeline with these modules, None for those that it lacks. make: its class."""
        return make(
            **{name: modules.get(name) for name in ("vae", "text_encoder", "unet", "safety_checker")},
            tokenizer=companions["tokenizer"],
            scheduler=companions["scheduler"],
            feature_extractor=companions.get("feature_extractor"),
            requires_safety_checker="safety_checker" in modules,
            **more,
        )

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return {
            **unet_fingerprint(configs["unet"]),
            **vae_fingerprint(configs["vae"]),
            **text_fingerprint(configs["text_encoder"], *self.part("text_encoder").layouts),
        }

    def title_of(self, configs: Mapping[str, Config]) -> str:
        """Return the Stable Diffusion generation of a text encoder. Its LoRAs also fit models distilled from it."""
        text = configs.get("text_encoder")
        if text is None:
            return "Stable Diffusion 1.x and 2.x"
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
