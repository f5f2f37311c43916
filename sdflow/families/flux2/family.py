"""FLUX.2-klein: a flow matching transformer with Qwen3's hidden states as text and latents folded 2 x 2.

Based on diffusers' Flux2KleinPipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.flux2.references import Flux2References
from sdflow.families.flux2.transformer import DISTILLED, Flux2Transformer
from sdflow.families.flux2.vae import Flux2VaeDecoder, Flux2VaeEncoder, folded_channels, folded_scale
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import Flow, even_sigmas
from sdflow.families.shared.part import Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import plain_texts
from sdflow.families.shared.transformer import LAYOUT, denoiser_part, load_into_transformer
from sdflow.families.shared.truncation import chats_of
from sdflow.models.base import Config
from sdflow.models.qwen3_text import LAYERS, TOKENS, Qwen3Bare, Qwen3Text
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

LENGTH = 512
"""Default padded text length in tokens, as in diffusers."""
_STATES = (9, 18, 27)
"""Hidden states of Qwen3 that are concatenated."""
_SIDE = 1024
"""Default image side in pixels (`default_sample_size` of diffusers' pipeline)."""
_VAE = Layout("first_stage_model.")


class _Noising(Flow):
    """Spreads steps evenly over sigma, to 1 / steps, before shifting by the number of steps and the image's size."""

    def key(self, scheduler: Any, tokens: int) -> int | None:
        return tokens

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, strength: float | None = None) -> None:
        scheduler.set_timesteps(sigmas=even_sigmas(steps), mu=_shift(tokens, steps))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: int) -> None:
        """As in Flux2KleinPipeline."""
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        scheduler.set_timesteps(sigmas=even_sigmas(steps), mu=compute_empirical_mu(tokens, steps))


def _shift(tokens: int, steps: int) -> float:
    """Return `mu`: linear in tokens at 10 and 200 steps, interpolated between them; for large images, that of 200
    steps."""
    of_many = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return of_many
    of_few = 8.73809524e-05 * tokens + 1.89833333
    slope = (of_many - of_few) / 190
    return slope * steps + (of_many - 200 * slope)


class Flux2(Family):
    name = "flux2"
    title = "FLUX.2-klein"
    classes = ("Flux2KleinPipeline",)
    parts = (
        Part(
            "text_encoder",
            Qwen3Text(),
            "text_encoder",
            "Qwen3: token ids to hidden states of three layers.",
            layouts=(Layout("text_encoders.qwen3_4b.transformer."),),
            whole=True,
            config={LAYERS: list(_STATES)},
            instead=(Qwen3Bare(),),
        ),
        denoiser_part(Flux2Transformer(), options=(DISTILLED,)),
        Part("vae_encoder", Flux2VaeEncoder(), "vae", "Pixels to latents; needed for images only.", layouts=(_VAE,)),
        Part("vae_decoder", Flux2VaeDecoder(), "vae", "Latents to pixels.", layouts=(_VAE,)),
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": Companion("transformers", "Qwen2TokenizerFast", "tokenizer_config.json", shipped=False),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising = _Noising()
    references = Flux2References()
    options: ClassVar[Mapping[str, Any]] = {DISTILLED: False}
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {"limit": 0.1, "keep": ["/context_embedder/*"]},
        "QuantizeInt4": {"limit": 0.15},
    }
    arguments: ClassVar[Mapping[str, Parameter]] = {
        "max_sequence_length": Parameter(
            "Tokens that a prompt is padded to.", int, least=16, most=LENGTH, otherwise=str(LENGTH)
        ),
    }
    length_arguments = ("max_sequence_length",)
    of_one_length = ()
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=50, guidance_scale=4.0),
        "image": Defaults(steps=50, guidance_scale=4.0, strength=0.8),
        "inpaint": Defaults(steps=50, guidance_scale=8.0, strength=0.8),
    }
    embeddings = ("prompt_embeds", "negative_prompt_embeds")
    relatives = (("double_stream_modulation_img.", "denoiser of FLUX.2"),)
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTFlux2KleinPipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "flux2-klein-4b": Architecture(),
        "flux2-klein-9b": Architecture(like="flux2-klein-4b"),
        "flux2-klein-base-4b": Architecture(like="flux2-klein-4b", marked=True),
        "flux2-klein-base-9b": Architecture(like="flux2-klein-9b", marked=True),
        "flux2-tiny": Architecture(borrowed={"tokenizer": "flux2-klein-4b/tokenizer"}),
        "flux2-base-tiny": Architecture(like="flux2-tiny", marked=True),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer, vae = configs["transformer"], configs["vae"]
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        prefix, doubles, singles = LAYOUT.prefix, transformer["num_layers"], transformer["num_single_layers"]
        return {
            f"{prefix}img_in.weight": (width, transformer["in_channels"]),
            f"{prefix}txt_in.weight": (width, transformer["joint_attention_dim"]),
            f"{prefix}double_blocks.{doubles - 1}.img_attn.qkv.weight": (3 * width, width),
            f"{prefix}double_blocks.{doubles}.img_attn.qkv.weight": None,
            f"{prefix}single_blocks.{singles}.linear1.weight": None,
            f"{_VAE.prefix}bn.running_mean": (folded_channels(vae),),
        }

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        """Return the properties of folded and normalized latents, as in both halves of the VAE."""
        vae = configs[self.decoder]
        scale = folded_scale(vae)
        return Latents(
            channels=folded_channels(vae),
            scale=scale,
            multiple=1,
            size=min(_SIDE, int(vae["sample_size"])) // scale,
            factor=1.0,
        )

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        return {TOKENS: LENGTH}

    def guided(self, configs: Mapping[str, Config], scale: float) -> bool:
        """Distilled models have no guidance at any scale, as in diffusers."""
        return scale > 1 and not configs[self.denoiser].get(DISTILLED)

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        distilled = {"steps": 4, "guidance_scale": 1.0} if configs[self.denoiser].get(DISTILLED) else {}
        return settled(self.defaults, configs[self.denoiser], scheduler, {**distilled, **said})

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' Flux2KleinPipeline: `encode_prompt`."""
        import torch

        texts = plain_texts(request.prompts, request.reading)
        guided = self.guided({self.denoiser: request.denoiser}, request.guidance_scale)
        if guided:
            texts = [*plain_texts(request.negatives or [""] * len(texts), request.reading), *texts]
        length = request.more.get("max_sequence_length") or LENGTH
        outputs = run("text_encoder", _tokens(companions["tokenizer"], texts, length))
        states = torch.cat([outputs[f"hidden_states.{layer}"] for layer in _STATES], dim=-1)
        return Conditions({"encoder_hidden_states": states}, halves=2 if guided else 1)

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        """diffusers splits a fused qkv layer into three."""
        found: dict[str, torch.Tensor] = self.lora_loader().lora_state_dict(dict(tensors))
        fused = any("attn_qkv." in name or "attn.qkv." in name for name in tensors)
        layers = {name.partition(".lora_")[0] for name in found}
        others = ("to_k", "to_v", "add_k_proj", "add_v_proj")
        return found, len([layer for layer in layers if not (fused and layer.endswith(others))])

    load_lora = load_into_transformer

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        texts = [list(prompts), [""] * len(prompts)] if guided else [list(prompts)]
        found = (pipeline.encode_prompt(each, device="cpu", **more)[0] for each in texts)
        return dict(zip(self.embeddings, found, strict=False))


FAMILY = Flux2()


def _tokens(tokenizer: Any, texts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    """Return ids and mask (texts, length) of each text as a user message, without thinking."""
    chats = chats_of(tokenizer, texts, length, thinking=False)
    found = tokenizer(chats, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}
