"""A family as FLUX.1: packed patches, rotary embeddings, CLIP's pooled embedding beside T5's tokens, no negative prompts.

After diffusers' FluxPipeline, of a model without guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sdflow_families.tiny_flux.model import PATCH, FluxTransformer, packed

from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import Flow, shift_of_diffusers
from sdflow.families.shared.part import Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import token_ids
from sdflow.families.shared.unet_and_vae import VAE, vae_fingerprint
from sdflow.models.base import Config
from sdflow.models.clip_text import ClipText
from sdflow.models.t5_text import TOKENS, T5Text

LENGTH = 64
"""Tokens that T5 reads of a text."""
SIDE = 16
"""Rows and columns of latents, of the images that the model was made for."""


class _Noising(Flow):
    """Steps are spread evenly over sigma, to 1 / steps, before they are shifted."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, strength: float | None = None) -> None:
        scheduler.set_timesteps(sigmas=_sigmas(steps), mu=self.shift({"max_shift": 1.15, **scheduler.config}, tokens))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: int) -> None:
        scheduler.set_timesteps(sigmas=_sigmas(steps), **shift_of_diffusers(scheduler.config, tokens))


def _sigmas(steps: int) -> Any:
    import numpy as np

    return np.linspace(1.0, 1 / steps, steps)


class TinyFlux(Family):
    name = "tiny_flux"
    title = "a tiny FLUX.1"
    classes = ("TinyFluxPipeline",)
    parts = (
        Part(
            "text_encoder",
            ClipText(),
            "text_encoder",
            "CLIP's text model.",
            read=lambda config: ("pooler_output",),
            layouts=(Layout("text_encoders.clip_l.transformer."),),
        ),
        Part(
            "text_encoder_2",
            T5Text(),
            "text_encoder_2",
            "T5's encoder.",
            layouts=(Layout("text_encoders.t5xxl.transformer."),),
        ),
        Part(
            "transformer",
            FluxTransformer(),
            "transformer",
            "The denoiser.",
            layouts=(Layout("model.diffusion_model."),),
            lora=("transformer.", "base_model.model."),
        ),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": Companion("transformers", "CLIPTokenizer", "tokenizer_config.json"),
        "tokenizer_2": Companion("transformers", "T5TokenizerFast", "tokenizer_config.json"),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising = _Noising()
    scheduler_config: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    of_one_length = ()
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=4, guidance_scale=1.0),
        "image": Defaults(steps=4, guidance_scale=1.0, strength=0.6),
        "inpaint": Defaults(steps=4, guidance_scale=1.0, strength=0.6),
    }
    reference_arguments: ClassVar[Mapping[str, Any]] = {"max_sequence_length": LENGTH}
    embeddings = ("prompt_embeds", "pooled_prompt_embeds")
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTTinyFluxPipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "flux-tiny": Architecture(
            borrowed={"tokenizer": "sd15/tokenizer", "tokenizer_2": "sd35-medium/tokenizer_3"},
        )
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer = configs["transformer"]
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        name = "model.diffusion_model.img_in.weight"
        return {name: (width, transformer["in_channels"]), **vae_fingerprint(configs["vae"])}

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return "tiny_flux"

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        denoiser = {**configs["transformer"], "sample_size": SIDE}  # its class has no such entry
        return Latents.of(denoiser, configs[self.decoder], multiple=PATCH, patch=PATCH, where="transformer")

    def packed(self, latents: Any) -> Any:
        return packed(latents)

    def input_channels(self, configs: Mapping[str, Config]) -> int:
        return int(configs["transformer"]["in_channels"]) // PATCH**2

    def task(self, configs: Mapping[str, Config]) -> Task:
        return "text"

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        return {"sequence": int(configs["text_encoder"]["max_position_embeddings"]), TOKENS: LENGTH}

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        return False

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        clip = run("text_encoder", {"input_ids": token_ids(companions["tokenizer"], request.prompts)})
        long = run("text_encoder_2", {"input_ids": token_ids(companions["tokenizer_2"], request.prompts, LENGTH)})
        inputs = {"encoder_hidden_states": long["last_hidden_state"], "pooled_projections": clip["pooler_output"]}
        return Conditions(inputs, halves=1)

    def lora_loader(self) -> Any:
        import diffusers

        return diffusers.FluxPipeline

    def lora_state(self, tensors: Mapping[str, Any], denoiser: Config) -> tuple[dict[str, Any], int]:
        diffusers_names = {name.replace("base_model.model.", "transformer."): each for name, each in tensors.items()}
        found: dict[str, Any] = self.lora_loader().lora_state_dict(diffusers_names)
        return found, len(found) // 2

    def load_lora(self, tensors: Mapping[str, Any], module: Any, adapter: str, **options: Any) -> None:
        self.lora_loader().load_lora_into_transformer(dict(tensors), None, module, adapter, **options)

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        names = ("transformer", "vae", "text_encoder", "text_encoder_2")
        return diffusers.FluxPipeline(
            **{name: modules.get(name) for name in names}, **{name: companions.get(name) for name in self.companions}
        )

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool
    ) -> dict[str, Any]:
        found = pipeline.encode_prompt(list(prompts), None, device="cpu", max_sequence_length=LENGTH)
        return dict(zip(self.embeddings, found[:2], strict=True))


FAMILY = TinyFlux()
