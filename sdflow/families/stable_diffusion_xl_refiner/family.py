"""The refiner of Stable Diffusion XL: continues from an image, or from the base's partially denoised latents.

It only has the second text encoder, and takes an aesthetic score in place of the target size. diffusers uses the
image-to-image class of the base for it; its checkpoints have no first text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sdflow.families.shared import xl_parts
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.colors import STABLE_DIFFUSION_XL, LatentColors
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.part import Companion
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import encode, last_but_one_layer
from sdflow.families.shared.unet_and_vae import UNET, VAE, projected_text_fingerprint, unet_fingerprint, vae_fingerprint
from sdflow.models.base import Config
from sdflow.models.unet import RefinerUNet
from sdflow.parameter import Parameter

_SCORES = {
    "aesthetic_score": Parameter("Aesthetic score to condition on.", float, default=6.0, otherwise="6"),
    "negative_aesthetic_score": Parameter(
        "Aesthetic score for the negative prompt.", float, default=2.5, otherwise="2.5"
    ),
}
"""Arguments with diffusers' defaults."""


class StableDiffusionXLRefiner(Family):
    name = "stable_diffusion_xl_refiner"
    title = "Stable Diffusion XL refiner"
    classes = ("StableDiffusionXLImg2ImgPipeline",)
    lacks = ("text_encoder", "tokenizer")
    parts = (
        xl_parts.open_clip_part("conditioner.embedders.0.model."),
        replace(UNET, model=RefinerUNet(), adapted=None),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "unet", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {"tokenizer_2": xl_parts.TOKENIZER, "scheduler": xl_parts.SCHEDULER}
    options: ClassVar[Mapping[str, Any]] = {"force_zeros_for_empty_prompt": True, "requires_aesthetics_score": False}
    arguments: ClassVar[Mapping[str, Parameter]] = {**xl_parts.SIZES, **_SCORES}
    defaults: ClassVar[Mapping[Task, Defaults]] = xl_parts.DEFAULTS
    embeddings = xl_parts.EMBEDDINGS
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION_XL
    assembled_as: ClassVar[Mapping[Task, str]] = {"image": "ORTStableDiffusionXLImg2ImgPipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "sdxl-refiner": Architecture(like="sdxl"),
        "sdxl-refiner-tiny": Architecture(like="sdxl-tiny"),
    }

    def task(self, configs: Mapping[str, Config]) -> Task:
        return "image"

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return {
            **unet_fingerprint(configs["unet"]),
            **vae_fingerprint(configs["vae"]),
            **projected_text_fingerprint(configs["text_encoder_2"], *self.part("text_encoder_2").layouts),
        }

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return "stable_diffusion_xl"

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' StableDiffusionXLImg2ImgPipeline without a first text encoder: `encode_prompt`,
        `_get_add_time_ids`."""
        import torch

        scores = {name: each.default for name, each in _SCORES.items()}
        more = {**scores, **{name: value for name, value in request.more.items() if value is not None}}
        texts, count = list(request.prompts), len(request.prompts)
        zeros = request.negatives is None and options["force_zeros_for_empty_prompt"]
        if request.guided and not zeros:
            texts = [*(request.negatives or [""] * count), *texts]
        (encoded,) = encode(run, request.reading, {"text_encoder_2": (companions["tokenizer_2"], texts)}).values()
        hidden, pooled = encoded.hidden(last_but_one_layer(encoded.outputs)), encoded.whole("text_embeds")
        if request.guided and zeros:
            hidden, pooled = (torch.cat([torch.zeros_like(each), each]) for each in (hidden, pooled))
        size = more.get("original_size") or (request.height, request.width)
        rows = [[*size, *(more.get("crops_coords_top_left") or (0, 0)), more["aesthetic_score"]]] * count
        if request.guided:
            rows = [[*size, 0, 0, more["negative_aesthetic_score"]]] * count + rows
        time_ids = torch.tensor(rows, dtype=torch.float32).to(hidden.device)
        inputs = {"encoder_hidden_states": hidden, "text_embeds": pooled, "time_ids": time_ids}
        return Conditions(inputs, halves=2 if request.guided else 1)

    def lora_loader(self) -> Any:
        import diffusers

        return diffusers.StableDiffusionXLPipeline

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        return diffusers.StableDiffusionXLImg2ImgPipeline(
            **{name: modules.get(name) for name in ("vae", "text_encoder_2", "unet")},
            **{name: companions[name] for name in self.companions},
            **options,
            text_encoder=None,
            tokenizer=None,
            add_watermarker=False,
        )


FAMILY = StableDiffusionXLRefiner()
