"""Latent consistency models (LCM, https://arxiv.org/abs/2310.04378): Stable Diffusion 1.x in few steps.

The UNet takes the guidance scale as an input: a run has one row for each image, and there is no negative prompt. Steps from
an image are spread over what its strength leaves, none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sdflow.families.base import Family
from sdflow.families.defaults import Defaults, Task
from sdflow.families.part import Companion
from sdflow.families.request import Conditions, Request, Run
from sdflow.families.stable_diffusion import StableDiffusion
from sdflow.models.base import Config

_PLAIN = StableDiffusion()


class LatentConsistency(Family):
    name = "latent_consistency"
    title = "Latent Consistency Models"
    classes = ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline")
    parts = _PLAIN.parts
    denoiser, decoder, encoder, checker = _PLAIN.denoiser, _PLAIN.decoder, _PLAIN.encoder, _PLAIN.checker
    companions: ClassVar[Mapping[str, Companion]] = _PLAIN.companions
    scheduler_config: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    arguments = ()
    strength_spreads = True
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=4, guidance_scale=8.5),
        "image": Defaults(steps=4, guidance_scale=8.5, strength=0.8),
        "inpaint": Defaults(steps=4, guidance_scale=8.5, strength=1.0),
    }
    embeddings = _PLAIN.embeddings
    colors = _PLAIN.colors
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTLatentConsistencyModelPipeline"}
    architectures = ("lcm", "lcm-tiny")

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return _PLAIN.fingerprint(configs)

    def title_of(self, configs: Mapping[str, Config]) -> str:
        """Of the models that it was distilled from: LoRAs of theirs fit."""
        return _PLAIN.title_of(configs)

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return _PLAIN.chains_of(configs)

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As diffusers' LatentConsistencyModelPipeline."""
        return _PLAIN.condition(run, companions, options, request)

    def lora_loader(self) -> Any:
        import diffusers

        return diffusers.LatentConsistencyModelPipeline

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        return diffusers.LatentConsistencyModelPipeline(
            **{name: modules.get(name) for name in ("vae", "text_encoder", "unet")},
            tokenizer=companions["tokenizer"],
            scheduler=companions["scheduler"],
            safety_checker=modules.get("safety_checker"),
            feature_extractor=companions.get("feature_extractor"),
            requires_safety_checker="safety_checker" in modules,
        )
