"""FLUX.1: a flow matching transformer on packed patches, with CLIP's pooled embedding and T5's tokens.

-schnell is distilled to a few steps without guidance; -dev takes the guidance scale as an input. Neither has a second
batch row for negative prompts. Based on diffusers' FluxPipeline; https://github.com/black-forest-labs/flux.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.flux.packing import PATCH, packed
from sdflow.families.flux.reference_loras import in_diffusers_names
from sdflow.families.flux.transformer import GUIDANCE, FluxTransformer
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import Flow, Noising, even_sigmas, shift_of_diffusers
from sdflow.families.shared.part import CLIP_TOKENIZER, Companion, Layout, Part
from sdflow.families.shared.reference_loras import split_kohya
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import SECOND_PROMPTS, further_texts, plain_texts, text_ids
from sdflow.families.shared.transformer import LAYOUT, denoiser_part, sized_by_vae
from sdflow.families.shared.unet_and_vae import VAE, vae_fingerprint
from sdflow.models import t5_text
from sdflow.models.base import Config
from sdflow.models.clip_text import PooledClipText
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

_LENGTHS = {False: 256, True: 512}
"""Default number of T5 tokens: -schnell's from its model card, and -dev's."""
MAX_SHIFT = 1.15
"""Default of the scheduler's config entry."""
_SIDE = 1024
"""Default image side in pixels if the VAE's config has none."""


class _Noising(Flow):
    """Spreads steps evenly over sigma, from 1 to 1 / steps, before shifting."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, strength: float | None = None) -> None:
        if scheduler.config.get("use_flow_sigmas"):  # it computes its own, as in diffusers' pipelines
            super().set_timesteps(scheduler, steps, tokens, strength)
            return
        self.require_flow(scheduler)
        mu = {"mu": self.shift({"max_shift": MAX_SHIFT, **scheduler.config}, tokens)}
        scheduler.set_timesteps(
            sigmas=even_sigmas(steps), **(mu if scheduler.config.get("use_dynamic_shifting") else {})
        )

    def as_diffusers(self, scheduler: Any, steps: int, tokens: int) -> None:
        """As in FluxPipeline."""
        mu = shift_of_diffusers({"max_shift": MAX_SHIFT, **scheduler.config}, tokens)
        scheduler.set_timesteps(sigmas=even_sigmas(steps), **mu)


class Flux(Family):
    name = "flux"
    title = "FLUX.1"
    classes = ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")
    parts = (
        Part(
            "text_encoder",
            PooledClipText(),
            "text_encoder",
            "The CLIP text model: token ids to embeddings, of which the pooled one is read.",
            read=lambda config: ("pooler_output",),
            layouts=(Layout("text_encoders.clip_l.transformer."),),
            lora=("lora_te1_", "text_encoder."),
        ),
        Part(
            "text_encoder_2",
            t5_text.T5Text(),
            "text_encoder_2",
            "T5's encoder: token ids to embeddings.",
            layouts=(Layout("text_encoders.t5xxl.transformer."),),
            whole=True,
        ),
        denoiser_part(FluxTransformer()),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": Companion(
            "transformers", "T5TokenizerFast", "tokenizer_config.json", parts=("text_encoder_2",), shipped=False
        ),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising: ClassVar[Noising] = _Noising()
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {"limit": 0.1, "keep": ["/context_embedder/*"]}
    }
    arguments: ClassVar[Mapping[str, Parameter]] = {
        "prompt_2": SECOND_PROMPTS["prompt_2"],
        "max_sequence_length": Parameter(
            "Tokens that T5 reads of a prompt.", int, least=1, most=512, otherwise="256 for -schnell, 512 for -dev"
        ),
    }
    length_arguments = ("max_sequence_length",)
    of_one_length = ()
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=50, guidance_scale=3.5),
        "image": Defaults(steps=28, guidance_scale=7.0, strength=0.6),
        "inpaint": Defaults(steps=28, guidance_scale=7.0, strength=0.6),
    }
    embeddings = ("prompt_embeds", "pooled_prompt_embeds")
    relatives = (("double_blocks.", "denoiser of Flux"),)
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTFluxPipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "flux1-schnell": Architecture(
            borrowed={"tokenizer": "sd15/tokenizer", "tokenizer_2": "sd35-medium/tokenizer_3"}
        ),
        "flux1-dev": Architecture(like="flux1-schnell"),
        "flux1-schnell-tiny": Architecture(
            borrowed={"tokenizer": "sd15/tokenizer", "tokenizer_2": "sd35-medium/tokenizer_3"}
        ),
        "flux1-dev-tiny": Architecture(like="flux1-schnell-tiny"),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer = configs["transformer"]
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        double, single = transformer["num_layers"] - 1, transformer["num_single_layers"] - 1
        found: dict[str, tuple[int, ...] | None] = {
            "img_in.weight": (width, transformer["in_channels"]),
            "txt_in.weight": (width, transformer["joint_attention_dim"]),
            "guidance_in.out_layer.weight": (width, width) if _takes_guidance(transformer) else None,
            f"double_blocks.{double}.img_attn.qkv.weight": (3 * width, width),
            f"double_blocks.{double + 1}.img_attn.qkv.weight": None,
            f"single_blocks.{single}.linear2.weight": (width, 5 * width),
            f"single_blocks.{single + 1}.linear2.weight": None,
        }
        return {
            **{f"{LAYOUT.prefix}{name}": shape for name, shape in found.items()},
            **vae_fingerprint(configs["vae"]),
        }

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return "flux1"

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        return sized_by_vae(configs[self.denoiser], configs[self.decoder], _SIDE, PATCH)

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        return packed(latents)

    def input_channels(self, configs: Mapping[str, Config]) -> int:
        return int(configs["transformer"]["in_channels"]) // PATCH**2

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """Return the model cards' values for text, and diffusers' signatures for -dev with images."""
        denoiser = configs[self.denoiser]
        own = self.defaults
        if not _takes_guidance(denoiser):
            own = {task: replace(each, steps=4, guidance_scale=0.0) for task, each in own.items()}
        return settled(own, denoiser, scheduler, said)

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        clip = int(configs["text_encoder"]["max_position_embeddings"])
        return {"sequence": clip, t5_text.TOKENS: _length(configs[self.denoiser])}

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        """Return False: -dev takes the scale as an input."""
        return False

    def reference_arguments_of(self, configs: Mapping[str, Config]) -> Mapping[str, Any]:
        return {"max_sequence_length": _length(configs[self.denoiser])}

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' FluxPipeline: `encode_prompt`."""
        import torch

        request.require_no_negatives()
        more = {name: value for name, value in request.more.items() if value is not None}
        count = len(request.prompts)
        second = further_texts(more.get("prompt_2"), request.prompts)
        clip, long = (plain_texts(texts, request.reading) for texts in (list(request.prompts), second))
        length = more.get("max_sequence_length", _length(request.denoiser))
        pooled = run("text_encoder", {"input_ids": text_ids(companions["tokenizer"], clip, "text_encoder (CLIP)")})
        ids = text_ids(companions["tokenizer_2"], long, "text_encoder_2 (T5)", length)
        tokens = run("text_encoder_2", {"input_ids": ids})
        inputs = {
            "encoder_hidden_states": tokens["last_hidden_state"],
            "pooled_projections": pooled["pooler_output"],
        }
        if _takes_guidance(request.denoiser):
            scale = torch.as_tensor(request.guidance_scale, dtype=torch.float32).reshape(1)
            inputs[GUIDANCE] = scale.repeat(count)
        return Conditions(inputs, halves=1)

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        """diffusers reads its own names; kohya's CLIP names are read as for SDXL."""
        rest, found, pairs = split_kohya(tensors, ("lora_te1_",))
        found |= self.lora_loader().lora_state_dict(rest) if rest else {}
        layers = len(found) // 2
        return found | in_diffusers_names(pairs, denoiser), layers + len(pairs)

    def load_lora(self, tensors: Mapping[str, torch.Tensor], module: Any, adapter: str, **options: Any) -> None:
        self.lora_loader().load_lora_into_transformer(dict(tensors), None, module, adapter, **options)

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        arguments = {"max_sequence_length": _length(configs[self.denoiser]), **more}
        found = pipeline.encode_prompt(list(prompts), None, device="cpu", **arguments)
        return dict(zip(self.embeddings, found[:2], strict=True))


FAMILY = Flux()


def _takes_guidance(transformer: Config) -> bool:
    return bool(transformer.get("guidance_embeds"))


def _length(transformer: Config) -> int:
    return _LENGTHS[_takes_guidance(transformer)]
