"""Stable Diffusion 3 and 3.5: a flow matching transformer with up to three text encoders, two of CLIP and T5.

Based on diffusers' StableDiffusion3Pipeline; https://arxiv.org/abs/2403.03206.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared import skipped_layers
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import FLOW, Noising
from sdflow.families.shared.part import CLIP_TOKENIZER, Companion, Layout, Part
from sdflow.families.shared.reference_loras import split_kohya
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import (
    SECOND_PROMPTS,
    further_texts,
    last_but_one,
    last_but_one_layer,
    plain_texts,
    text_ids,
)
from sdflow.families.shared.transformer import LAYOUT, denoiser_part, load_into_transformer
from sdflow.families.shared.unet_and_vae import VAE, vae_fingerprint
from sdflow.families.stable_diffusion_3.reference_loras import in_diffusers_names
from sdflow.families.stable_diffusion_3.transformer import TOKENS, SD3Transformer
from sdflow.models import t5_text
from sdflow.models.base import Config, Original
from sdflow.models.clip_text import ClipTextWithProjection
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

LENGTH = 256
"""Default number of T5 tokens, as in diffusers."""

PROJECTION = "text_projection.weight"
_LAYERS = {"output_hidden_states": True}


def _clip_l_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return the names of CLIP-L in files of the original layout, which omit its projection: the pooled embedding is
    unprojected."""
    model = ClipTextWithProjection()
    return {
        key: Original("", identity=True) if key == PROJECTION else Original(model.current_name(key)) for key in keys
    }


_CLIP_L = Layout("text_encoders.clip_l.transformer.", _clip_l_names, lambda name, keys: name == PROJECTION)
_CLIP_G = Layout("text_encoders.clip_g.transformer.")


def _clip(name: str, about: str, layout: Layout, lora: str) -> Part:
    return Part(
        name,
        ClipTextWithProjection(),
        name,
        about,
        read=lambda config: ("text_embeds", last_but_one(config)),
        layouts=(layout,),
        lora=(lora, f"{name}."),
        config=_LAYERS,
    )


_TOKENIZERS = {"tokenizer": "sd15/tokenizer", "tokenizer_2": "sd21/tokenizer"}


class StableDiffusion3(Family):
    name = "stable_diffusion_3"
    title = "Stable Diffusion 3"
    classes = ("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline")
    parts = (
        _clip("text_encoder", "The first CLIP text model: token ids to embeddings.", _CLIP_L, "lora_te1_"),
        _clip("text_encoder_2", "The second text model, OpenCLIP's: token ids to embeddings.", _CLIP_G, "lora_te2_"),
        Part(
            "text_encoder_3",
            t5_text.T5Text(),
            "text_encoder_3",
            "T5's encoder: token ids to embeddings. Without it, its tokens are zeros.",
            optional=True,
            layouts=(Layout("text_encoders.t5xxl.transformer."),),
            whole=True,
            unmerged=("lora_te3_", "text_encoder_3."),
        ),
        denoiser_part(SD3Transformer()),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": CLIP_TOKENIZER,
        "tokenizer_3": Companion(
            "transformers", "T5TokenizerFast", "tokenizer_config.json", parts=("text_encoder_3",), shipped=False
        ),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising: ClassVar[Noising] = FLOW
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {"limit": 0.1, "keep": ["/context_embedder/*"]}
    }
    arguments: ClassVar[Mapping[str, Parameter]] = {
        **SECOND_PROMPTS,
        "prompt_3": Parameter("Prompt for the third text encoder, T5.", str, otherwise="the prompt"),
        "negative_prompt_3": Parameter(
            "Negative prompt for the third text encoder, T5.", str, otherwise="the negative prompt"
        ),
        "max_sequence_length": Parameter(
            "Tokens that T5 reads of a prompt.", int, least=1, most=512, otherwise=str(LENGTH)
        ),
        **skipped_layers.ARGUMENTS,
    }
    length_arguments = ("max_sequence_length",)
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=40, guidance_scale=4.5),
        "image": Defaults(steps=50, guidance_scale=4.5, strength=0.6),
        "inpaint": Defaults(steps=50, guidance_scale=4.5, strength=0.6),
    }
    verified_guidance = 7.0
    embeddings = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    relatives = (("joint_blocks.", "denoiser of Stable Diffusion 3"),)
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTStableDiffusion3Pipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "sd35-medium": Architecture(borrowed=_TOKENIZERS),
        "sd35-large": Architecture(like="sd35-medium"),
        "sd3-medium": Architecture(like="sd35-medium"),
        "sd35-tiny": Architecture(borrowed={**_TOKENIZERS, "tokenizer_3": "sd35-medium/tokenizer_3"}),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer = configs["transformer"]
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        last, patch, dual = (
            transformer["num_layers"] - 1,
            transformer["patch_size"],
            transformer["dual_attention_layers"],
        )
        block = f"{LAYOUT.prefix}joint_blocks"
        return {
            f"{LAYOUT.prefix}x_embedder.proj.weight": (width, transformer["in_channels"], patch, patch),
            f"{block}.{last}.x_block.attn.qkv.weight": (3 * width, width),
            f"{block}.{last + 1}.x_block.attn.qkv.weight": None,
            f"{block}.0.x_block.attn.ln_q.weight": (
                (transformer["attention_head_dim"],) if transformer.get("qk_norm") else None
            ),
            f"{block}.{max(dual, default=0)}.x_block.attn2.qkv.weight": (3 * width, width) if dual else None,
            **vae_fingerprint(configs["vae"]),
        }

    def title_of(self, configs: Mapping[str, Config]) -> str:
        transformer = configs.get("transformer")
        return self.title if transformer is None else f"{self.title}{'.5' if transformer.get('qk_norm') else ''}"

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """Return steps for text, and guidance, from the model cards of 3.5-medium, 3.5-large and 3-medium; the rest
        from diffusers' signatures."""
        denoiser, own = configs[self.denoiser], dict(self.defaults)
        if not denoiser.get("dual_attention_layers"):
            guidance = 3.5 if denoiser.get("qk_norm") else 7.0
            own = {task: replace(each, guidance_scale=guidance) for task, each in own.items()}
            own["text"] = replace(own["text"], steps=28)
        return settled(own, denoiser, scheduler, said)

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        transformer = configs["transformer"]
        patch = int(transformer["patch_size"])
        return Latents.of(transformer, configs[self.decoder], multiple=patch, patch=patch, where="transformer")

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        length = self._clip_length(configs)
        return {"sequence": length, t5_text.TOKENS: LENGTH, TOKENS: length + LENGTH}

    def _clip_length(self, configs: Mapping[str, Config]) -> int:
        return max(int(configs[name]["max_position_embeddings"]) for name in ("text_encoder", "text_encoder_2"))

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' StableDiffusion3Pipeline: `encode_prompt`."""
        import torch

        more = {name: value for name, value in request.more.items() if value is not None}
        count = len(request.prompts)

        def texts(first: Sequence[str], names: Sequence[str]) -> list[list[str]]:
            others = [further_texts(more.get(name), first) for name in names]
            return [plain_texts(each, request.reading) for each in (list(first), *others)]

        wanted = texts(request.prompts, ("prompt_2", "prompt_3"))
        if request.guided:
            negatives = texts(request.negatives or [""] * count, ("negative_prompt_2", "negative_prompt_3"))
            wanted = [[*negative, *positive] for negative, positive in zip(negatives, wanted, strict=True)]
        outputs = [
            run(name, {"input_ids": text_ids(companions[tokenizer], of, f"{name} (CLIP)")})
            for name, tokenizer, of in (
                ("text_encoder", "tokenizer", wanted[0]),
                ("text_encoder_2", "tokenizer_2", wanted[1]),
            )
        ]
        clip = torch.cat([each[last_but_one_layer(each)] for each in outputs], dim=-1)
        pooled = torch.cat([each["text_embeds"] for each in outputs], dim=-1)
        length = more.get("max_sequence_length", LENGTH)
        long = self._long(run, companions, wanted[2], length, clip, int(request.denoiser["joint_attention_dim"]))
        padded = torch.nn.functional.pad(clip, (0, long.shape[-1] - clip.shape[-1]))
        inputs = {"encoder_hidden_states": torch.cat([padded, long], dim=1), "pooled_projections": pooled}
        return Conditions(inputs, halves=2 if request.guided else 1)

    def _long(
        self,
        run: Run,
        companions: Mapping[str, Any],
        texts: Sequence[str],
        length: int,
        clip: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Return T5's embeddings (texts, length, width), or zeros if the pipeline has no T5."""
        import torch

        tokenizer = companions.get("tokenizer_3")
        if tokenizer is None:
            return torch.zeros(len(clip), length, width, dtype=clip.dtype, device=clip.device)
        found = run("text_encoder_3", {"input_ids": text_ids(tokenizer, texts, "text_encoder_3 (T5)", length)})
        return found["last_hidden_state"]

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        """diffusers only reads its own names: kohya's CLIP names are read as for SDXL, and the transformer's not at
        all."""
        found, of_text, pairs = split_kohya(tensors, ("lora_te1_", "lora_te2_"))
        found |= of_text
        layers = len(found) // 2
        return found | in_diffusers_names(pairs, denoiser), layers + len(pairs)

    load_lora = load_into_transformer

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        """Without T5, diffusers takes the width of its zeros from the transformer; one without weights suffices."""
        if pipeline.text_encoder_3 is None and pipeline.transformer is None:
            from accelerate import init_empty_weights

            with init_empty_weights():
                pipeline.transformer = self.part("transformer").model.empty(configs["transformer"])
        texts = list(prompts)
        found = pipeline.encode_prompt(texts, None, None, device="cpu", do_classifier_free_guidance=guided, **more)
        return {name: value for name, value in zip(self.embeddings, found, strict=True) if value is not None}


FAMILY = StableDiffusion3()
