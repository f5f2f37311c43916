"""The refiner of Stable Diffusion XL: it goes on from an image, or from what the base leaves it of the steps.

It has the second text encoder alone, and takes an aesthetic score in place of the target's size. Its class in diffusers is that
of image to image with the base; its checkpoints name no first text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sdflow.errors import UsageError
from sdflow.families import xl_parts
from sdflow.families.base import Family
from sdflow.families.colors import STABLE_DIFFUSION_XL, LatentColors
from sdflow.families.defaults import Defaults, Task
from sdflow.families.part import Companion
from sdflow.families.request import Conditions, Request, Run
from sdflow.families.shared_parts import UNET, VAE, projected_text_fingerprint, unet_fingerprint, vae_fingerprint
from sdflow.families.text import encode, last_but_one_layer
from sdflow.models.base import Config
from sdflow.models.unet import RefinerUNet

_SCORES = {"aesthetic_score": 6.0, "negative_aesthetic_score": 2.5}
"""As diffusers has them."""


class StableDiffusionXLRefiner(Family):
    name = "stable_diffusion_xl_refiner"
    title = "the refiner of Stable Diffusion XL"
    classes = ("StableDiffusionXLImg2ImgPipeline",)
    lacks = ("text_encoder", "tokenizer")
    parts = (
        xl_parts.open_clip_part("conditioner.embedders.0.model."),
        replace(UNET, model=RefinerUNet(), adapted=None),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "unet", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer_2": xl_parts.TOKENIZER,
        "scheduler": xl_parts.SCHEDULER,
    }
    scheduler_config: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {"force_zeros_for_empty_prompt": True, "requires_aesthetics_score": False}
    arguments = ("original_size", "crops_coords_top_left", *_SCORES)
    defaults: ClassVar[Mapping[Task, Defaults]] = xl_parts.DEFAULTS
    embeddings = xl_parts.EMBEDDINGS
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION_XL
    assembled_as: ClassVar[Mapping[Task, str]] = {"image": "ORTStableDiffusionXLImg2ImgPipeline"}
    architectures = ("sdxl-refiner", "sdxl-refiner-tiny")

    def task(self, configs: Mapping[str, Config]) -> Task:
        return "image"

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return {
            **unet_fingerprint(configs["unet"]),
            **vae_fingerprint(configs["vae"]),
            **projected_text_fingerprint(configs["text_encoder_2"], *self.part("text_encoder_2").layouts),
        }

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return xl_parts.CHAINS

    def require_arguments(self, given: Mapping[str, Any], prompts: int) -> None:
        super().require_arguments(given, prompts)
        xl_parts.require_sizes(given)
        for name in _SCORES:
            if (score := given.get(name)) is not None and not isinstance(score, (int, float)):
                raise UsageError(f"it is {score!r}", where=name, remedy="Give a number; around 6 is usual.")

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As diffusers' StableDiffusionXLImg2ImgPipeline without a first text encoder: `encode_prompt`,
        `_get_add_time_ids`."""
        import torch

        more = {**_SCORES, **{name: value for name, value in request.more.items() if value is not None}}
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
        return xl_parts.lora_loader()

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
