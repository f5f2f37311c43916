"""Z-Image and Z-Image-Turbo: a transformer that reads image and text as one sequence, flow matching, and Qwen3 as text encoder.

After diffusers' ZImagePipeline; https://arxiv.org/abs/2511.22699.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.families.shared import guidance_limits
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.defaults import Defaults, Task, settled
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.part import Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import plain_texts
from sdflow.families.shared.truncation import ends_of_chats, warn_of_truncation
from sdflow.families.shared.unet_and_vae import VAE, vae_fingerprint
from sdflow.families.z_image.noising import NOISING, is_turbo
from sdflow.families.z_image.reference_loras import in_diffusers_names
from sdflow.families.z_image.traced import MULTIPLE, PATCH
from sdflow.families.z_image.transformer import TOKENS, USUAL_TOKENS, ZImageTransformer
from sdflow.models import qwen3_text
from sdflow.models.base import Config, halved
from sdflow.parameter import Parameter

if TYPE_CHECKING:
    import torch

LENGTH = 512
"""Maximum number of prompt tokens, including the chat template, as in diffusers."""
SIDE = 1024
"""Height and width of the images that the model was made for, in pixels."""

_TRANSFORMER = Layout("model.diffusion_model.")
_TURBO = {"steps": 8, "guidance_scale": 0.0}
_TOKENIZER = {"tokenizer": "flux2-klein-4b/tokenizer"}


def _last_but_one(config: Config) -> str:
    return f"hidden_states.{config['num_hidden_layers'] - 1}"


class ZImage(Family):
    name = "z_image"
    title = "Z-Image"
    classes = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    parts = (
        Part(
            "text_encoder",
            qwen3_text.Qwen3Bare(),
            "text_encoder",
            "Qwen3: token ids to embeddings, those before its last layer.",
            layouts=(Layout("text_encoders.qwen3_4b.transformer.model."),),
            whole=True,
            config={qwen3_text.LAYERS: [-2]},
            instead=(qwen3_text.Qwen3Text(),),
        ),
        Part(
            "transformer",
            ZImageTransformer(),
            "transformer",
            "The denoiser, run once per step.",
            layouts=(_TRANSFORMER,),
            lora=("transformer.", "lora_transformer_", "lora_unet_", "diffusion_model.", "base_model.model.", ""),
        ),
        *VAE,
    )
    denoiser, decoder, encoder, checker = "transformer", "vae_decoder", "vae_encoder", None
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": Companion("transformers", "Qwen2Tokenizer", "tokenizer_config.json", shipped=False),
        "scheduler": Companion("diffusers", None, "scheduler_config.json"),
    }
    noising = NOISING
    scheduler_config: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
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
    assembled_as: ClassVar[Mapping[Task, str]] = {"text": "ORTZImagePipeline"}
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "z-image-turbo": Architecture(borrowed=_TOKENIZER),
        "z-image": Architecture(like="z-image-turbo", marked=True),
        "z-image-tiny": Architecture(borrowed=_TOKENIZER),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        transformer = configs["transformer"]
        width, layers, prefix = transformer["dim"], transformer["n_layers"], _TRANSFORMER.prefix
        return {
            f"{prefix}x_embedder.weight": (width, PATCH * PATCH * transformer["in_channels"]),
            f"{prefix}cap_embedder.1.weight": (width, transformer["cap_feat_dim"]),
            f"{prefix}layers.{layers - 1}.attention.qkv.weight": (3 * width, width),
            f"{prefix}layers.{layers}.attention.qkv.weight": None,
            **vae_fingerprint(configs["vae"]),
        }

    def chains_of(self, configs: Mapping[str, Config]) -> str:
        return "z_image"

    def defaults_of(
        self, configs: Mapping[str, Config], scheduler: Config, said: Mapping[str, Any]
    ) -> dict[Task, Defaults]:
        """Turbo and the model that it was distilled from differ in the scheduler's shift alone."""
        changed = {**_TURBO, **said} if is_turbo(scheduler) else said
        return settled(self.defaults, configs[self.denoiser], scheduler, changed)

    def latents(self, configs: Mapping[str, Config]) -> Latents:
        vae = configs[self.decoder]
        side = int(vae.get("sample_size") or SIDE) // halved(vae)
        denoiser = {**configs[self.denoiser], "sample_size": side}  # its class has no such entry
        return Latents.of(denoiser, vae, multiple=PATCH, patch=PATCH, where="transformer")

    def token_sizes(self, configs: Mapping[str, Config]) -> dict[str, int]:
        return {qwen3_text.TOKENS: USUAL_TOKENS, TOKENS: USUAL_TOKENS}

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As diffusers' ZImagePipeline: `encode_prompt`. All texts are padded to the next multiple of 32 of the longest."""
        texts = plain_texts(request.prompts, request.reading)
        if request.guided:
            texts = [*plain_texts(request.negatives or [""] * len(texts), request.reading), *texts]
        length = request.more.get("max_sequence_length") or LENGTH
        ids, mask = _tokens(companions["tokenizer"], texts, length)
        states = run("text_encoder", {"input_ids": ids, "attention_mask": mask})
        (found,) = states.values()
        inputs = {"encoder_hidden_states": found, "encoder_attention_mask": mask.to(found.device)}
        return Conditions(inputs, halves=2 if request.guided else 1)

    def lora_loader(self) -> Any:
        import diffusers

        return diffusers.ZImagePipeline

    def lora_state(self, tensors: Mapping[str, torch.Tensor], denoiser: Config) -> tuple[dict[str, torch.Tensor], int]:
        return in_diffusers_names(tensors)

    def load_lora(self, tensors: Mapping[str, torch.Tensor], module: Any, adapter: str, **options: Any) -> None:
        self.lora_loader().load_lora_into_transformer(dict(tensors), module, adapter, **options)

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        return diffusers.ZImagePipeline(
            **{name: modules.get(name) for name in ("transformer", "vae", "text_encoder")},
            **{name: companions.get(name) for name in self.companions},
        )

    def encode_reference(
        self, pipeline: Any, prompts: Sequence[str], configs: Mapping[str, Config], *, guided: bool, **more: Any
    ) -> dict[str, Any]:
        """Lists, of one embedded text for each prompt: they differ in length."""
        found = pipeline.encode_prompt(list(prompts), device="cpu", do_classifier_free_guidance=guided, **more)
        return {name: value for name, value in zip(self.embeddings, found, strict=True) if value}


FAMILY = ZImage()


def _tokens(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the texts in the chat template and their mask, (texts, tokens) int32 each: padded on the right to a multiple of
    32, and cut after `length`."""
    import torch

    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for text in texts
    ]
    warn_of_truncation(tokenizer, asked, length, "text_encoder (Qwen3)", ends=ends_of_chats(asked, texts))
    found = tokenizer(asked, max_length=length, truncation=True)
    if isinstance(found.input_ids, torch.Tensor):  # inputs of a graph that is exported, padded already
        return found.input_ids, found.attention_mask
    rows: list[list[int]] = found.input_ids
    size = -(-max(map(len, rows)) // MULTIPLE) * MULTIPLE
    ids = [[*row, *[tokenizer.pad_token_id] * (size - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (size - len(row)) for row in rows]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.int32)
