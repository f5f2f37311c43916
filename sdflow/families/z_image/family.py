"""Z-Image and Z-Image-Turbo: a flow matching transformer on image and text as one sequence, with Qwen3 as text encoder.

Based on diffusers' ZImagePipeline; https://arxiv.org/abs/2511.22699.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared import guidance_limits
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.noising import Flow
from sdflow.families.shared.part import Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import plain_texts
from sdflow.families.shared.transformer import LAYOUT, denoiser_part, load_into_transformer, sized_by_vae
from sdflow.families.shared.truncation import chats_of
from sdflow.families.shared.unet_and_vae import VAE, vae_fingerprint
from sdflow.families.z_image.reference_loras import in_diffusers_names
from sdflow.families.z_image.traced import MULTIPLE, PATCH
from sdflow.families.z_image.transformer import TOKENS, USUAL_TOKENS, ZImageTransformer
from sdflow.models import qwen3_text
from sdflow.models.base import Config
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

LENGTH = 512
"""Maximum number of prompt tokens, including the chat template, as in diffusers."""
SIDE = 1024
"""Native image height and width, in pixels."""

_TURBO = {"steps": 8, "guidance_scale": 0.0}
_TOKENIZER = {"tokenizer": "flux2-klein-4b/tokenizer"}

TURBO_SHIFT = 3.0
"""Shift of the published Z-Image-Turbo; Z-Image has 6."""


def is_turbo(scheduler: Config) -> bool:
    """Whether a scheduler config is Z-Image-Turbo's."""
    return not scheduler.get("use_dynamic_shifting") and scheduler.get("shift") == TURBO_SHIFT


class ZImageNoising(Flow):
    """Spaces sigmas from 1 to 1 / steps, before shifting."""

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, strength: float | None = None) -> None:
        if "sigmas" not in inspect.signature(scheduler.set_timesteps).parameters:
            super().set_timesteps(scheduler, steps, tokens, strength)  # raises the error
        import torch

        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=self.shift({"max_shift": 1.15, **scheduler.config}, tokens))

    def as_diffusers(self, scheduler: Any, steps: int, tokens: int) -> None:
        """Uses the functions of diffusers' ZImagePipeline."""
        from diffusers.pipelines.z_image import pipeline_z_image as theirs

        config = scheduler.config
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        given = {name.replace("image_seq_len", "seq_len"): config[name] for name in names if name in config}
        sigmas = theirs.get_default_z_image_sigmas(steps)
        theirs.retrieve_timesteps(scheduler, steps, sigmas=sigmas, mu=theirs.calculate_shift(tokens, **given))


class ZImage(Family):
    name = "z_image"
    title = "Z-Image"
    classes = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    parts = (
        Part(
            "text_encoder",
            qwen3_text.Qwen3Bare(),
            "text_encoder",
            "Qwen3: token ids to the embeddings before its last layer.",
            layouts=(Layout("text_encoders.qwen3_4b.transformer.model."),),
            whole=True,
            config={qwen3_text.LAYERS: [-2]},
            instead=(qwen3_text.Qwen3Text(),),
        ),
        denoiser_part(ZImageTransformer()),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": Companion("transformers", "Qwen2Tokenizer", "tokenizer_config.json", shipped=False),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising = ZImageNoising()
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {"limit": 0.15, "keep": ["/cap_embedder/*"]}
    }
    arguments: ClassVar[Mapping[str, Parameter]] = {
        "max_sequence_length": Parameter(
            "Maximum number of prompt tokens, including the chat template.",
            int,
            least=1,
            most=512,
            otherwise=str(LENGTH),
        ),
        **guidance_limits.ARGUMENTS,
    }
    texts_vary = True
    guidance_offset = 1.0
    of_one_length = ()
    defaults: ClassVar[Mapping[Task, Defaults]] = {
        "text": Defaults(steps=50, guidance_scale=4.0),
        "image": Defaults(steps=50, guidance_scale=4.0, strength=0.6),
        "inpaint": Defaults(steps=50, guidance_scale=4.0, strength=1.0),
    }
    verified_guidance = 5.0
    embeddings = ("prompt_embeds", "negative_prompt_embeds")
    relatives = (("cap_pad_token", "denoiser of Z-Image"),)
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTZImagePipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "z-image-turbo": Architecture(borrowed=_TOKENIZER),
        "z-image": Architecture(like="z-image-turbo", marked=True),
        "z-image-tiny": Architecture(borrowed=_TOKENIZER),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer = configs["transformer"]
        width, layers, prefix = transformer["dim"], transformer["n_layers"], LAYOUT.prefix
        return {
            f"{prefix}x_embedder.weight": (width, PATCH * PATCH * transformer["in_channels"]),
            f"{prefix}cap_embedder.1.weight": (width, transformer["cap_feat_dim"]),
            f"{prefix}layers.{layers - 1}.attention.qkv.weight": (3 * width, width),
            f"{prefix}layers.{layers}.attention.qkv.weight": None,
            **vae_fingerprint(configs["vae"]),
        }

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """Turbo and the model it was distilled from only differ in the scheduler's shift."""
        changed = {**_TURBO, **said} if is_turbo(scheduler) else said
        return settled(self.defaults, configs[self.denoiser], scheduler, changed)

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        return sized_by_vae(configs[self.denoiser], configs[self.decoder], SIDE, PATCH)

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        return {qwen3_text.TOKENS: USUAL_TOKENS, TOKENS: USUAL_TOKENS}

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' ZImagePipeline: `encode_prompt`. All texts are padded to the longest's next multiple of
        32."""
        texts = plain_texts(request.prompts, request.reading)
        if request.guided:
            texts = [*plain_texts(request.negatives or [""] * len(texts), request.reading), *texts]
        length = request.more.get("max_sequence_length") or LENGTH
        ids, mask = _tokens(companions["tokenizer"], texts, length)
        states = run("text_encoder", {"input_ids": ids, "attention_mask": mask})
        (found,) = states.values()
        inputs = {"encoder_hidden_states": found, "encoder_attention_mask": mask.to(found.device)}
        return Conditions(inputs, halves=2 if request.guided else 1)

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        return in_diffusers_names(tensors)

    load_lora = load_into_transformer

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        """Return lists with one embedded text per prompt, since they differ in length."""
        found = pipeline.encode_prompt(list(prompts), device="cpu", do_classifier_free_guidance=guided, **more)
        return {name: value for name, value in zip(self.embeddings, found, strict=True) if value}


FAMILY = ZImage()


def _tokens(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of the texts in the chat template and their mask, (texts, tokens) int32 each: truncated to `length`,
    and padded on the right to a multiple of 32."""
    import torch

    found = tokenizer(chats_of(tokenizer, texts, length, thinking=True), max_length=length, truncation=True)
    if isinstance(found.input_ids, torch.Tensor):  # already padded inputs of a graph being exported
        return found.input_ids, found.attention_mask
    rows: list[list[int]] = found.input_ids
    size = -(-max(map(len, rows)) // MULTIPLE) * MULTIPLE
    ids = [[*row, *[tokenizer.pad_token_id] * (size - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (size - len(row)) for row in rows]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.int32)
