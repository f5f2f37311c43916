"""Stable Diffusion XL: two text encoders, read at the second to last layer, and size conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.errors import UsageError
from sdflow.families.shared import xl_parts
from sdflow.families.shared.architecture import Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.colors import STABLE_DIFFUSION_XL, LatentColors
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.image_prompts import with_projections
from sdflow.families.shared.part import Companion, Layout, Part
from sdflow.families.shared.request import Conditions, Request, Run
from sdflow.families.shared.text import SECOND_PROMPTS, encode, further_texts, last_but_one, last_but_one_layer
from sdflow.families.shared.unet_and_vae import (
    CONTROLNET,
    IMAGE_ENCODER,
    UNET,
    VAE,
    projected_text_fingerprint,
    text_fingerprint,
    unet_fingerprint,
    vae_fingerprint,
)
from sdflow.families.shared.xl_parts import LAYERS, SCHEDULER, TOKENIZER, open_clip_part
from sdflow.models.base import Config
from sdflow.models.clip_text import ClipText
from sdflow.parameter import Parameter, pair
from sdflow.prompts.reading import Reading

if TYPE_CHECKING:
    import torch


_TOKENIZERS = {"tokenizer": "sd15/tokenizer", "tokenizer_2": "sd21/tokenizer"}


class StableDiffusionXL(Family):
    name = "stable_diffusion_xl"
    title = "Stable Diffusion XL"
    classes = (
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
        "StableDiffusionXLControlNetInpaintPipeline",
    )
    parts = (
        Part(
            "text_encoder",
            ClipText(),
            "text_encoder",
            "The first CLIP text model: token ids to embeddings.",
            read=lambda config: (last_but_one(config),),
            layouts=(Layout("conditioner.embedders.0.transformer."),),
            lora=("lora_te1_", "text_encoder."),
            config=LAYERS,
            embedding="clip_l",
        ),
        open_clip_part("conditioner.embedders.1.model."),
        UNET,
        *VAE,
    )
    denoiser, decoder, encoder, checker = "unet", "vae_decoder", "vae_encoder", None
    net = CONTROLNET
    prompter = IMAGE_ENCODER
    companions: ClassVar[Mapping[str, Companion]] = {
        "tokenizer": TOKENIZER,
        "tokenizer_2": TOKENIZER,
        "scheduler": SCHEDULER,
        "feature_extractor": Companion(
            "transformers", "CLIPImageProcessor", "preprocessor_config.json", parts=(IMAGE_ENCODER.name,)
        ),
    }
    options: ClassVar[Mapping[str, Any]] = {"force_zeros_for_empty_prompt": True}
    arguments: ClassVar[Mapping[str, Parameter]] = {
        **SECOND_PROMPTS,
        **xl_parts.SIZES,
        "target_size": Parameter(
            "Target size to condition on, as HEIGHTxWIDTH.",
            tuple[int, int],
            least=1,
            otherwise="the output size",
            read=pair,
        ),
    }
    defaults: ClassVar[Mapping[Task, Defaults]] = xl_parts.DEFAULTS
    embeddings = xl_parts.EMBEDDINGS
    colors: ClassVar[LatentColors] = STABLE_DIFFUSION_XL
    quantizing: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "QuantizeFp8": {
            "limit": 0.1,
            "keep": ["*/to_out.0/*", "*/attn2/to_q/*", "*/proj_in/*", "*/proj_out/*"],
        }
    }
    assembled_as: ClassVar[Mapping[Task, str]] = {
        "text": "ORTStableDiffusionXLPipeline",
        "inpaint": "ORTStableDiffusionXLInpaintPipeline",
    }
    architectures: ClassVar[Mapping[str, Architecture]] = {
        "sdxl": Architecture(borrowed=_TOKENIZERS),
        "sdxl-tiny": Architecture(borrowed=_TOKENIZERS),
        "sdxl-turbo": Architecture(like="sdxl"),
        "sdxl-turbo-tiny": Architecture(like="sdxl-tiny"),
        "lcm-sdxl": Architecture(like="sdxl"),
        "lcm-sdxl-tiny": Architecture(like="sdxl-tiny"),
        "sdxl-inpainting": Architecture(like="sdxl"),
        "sdxl-inpainting-tiny": Architecture(like="sdxl-tiny"),
        "sdxl-v": Architecture(like="sdxl", marked=True),
        "sdxl-v-tiny": Architecture(like="sdxl-tiny", marked=True),
        "sdxl-v-zsnr": Architecture(like="sdxl", marked=True),
        "sdxl-v-zsnr-tiny": Architecture(like="sdxl-tiny", marked=True),
    }

    def fingerprint(self, configs: Mapping[str, Config]) -> dict[str, tuple[int, ...] | None]:
        return {
            **unet_fingerprint(configs["unet"]),
            **vae_fingerprint(configs["vae"]),
            **text_fingerprint(configs["text_encoder"], *self.part("text_encoder").layouts),
            **projected_text_fingerprint(configs["text_encoder_2"], *self.part("text_encoder_2").layouts),
        }

    def condition(
        self, run: Run, companions: Mapping[str, Any], options: Mapping[str, Any], request: Request
    ) -> Conditions:
        """As in diffusers' StableDiffusionXLPipeline: `encode_prompt`, `_get_add_time_ids`."""
        import torch

        if request.guidance_width is not None:
            request.require_no_negatives()
        more = {name: value for name, value in request.more.items() if value is not None}
        texts, count = _Texts(request.prompts, more.get("prompt_2")), len(request.prompts)
        zeros = request.negatives is None and options["force_zeros_for_empty_prompt"]
        if zeros and "negative_prompt_2" in more:
            raise UsageError(
                "has no effect without a negative prompt: this model then uses zeros",
                where="negative_prompt_2",
                remedy="Set a negative prompt too.",
            )
        if request.guided and not zeros:
            texts = _Texts(request.negatives or [""] * count, more.get("negative_prompt_2")) + texts
        hidden, pooled = texts.encoded(run, companions, request.reading)
        if request.guided and zeros:
            hidden, pooled = (torch.cat([torch.zeros_like(each), each]) for each in (hidden, pooled))
        height, width = more.get("original_size") or (request.height, request.width)
        top, left = more.get("crops_coords_top_left") or (0, 0)
        target = more.get("target_size") or (request.height, request.width)
        # Separate tensors, and `shape` instead of `len`, so a trace keeps sizes that are inputs, and the batch size.
        sizes = torch.stack(
            [torch.as_tensor(size, dtype=torch.float32) for size in (height, width, top, left, *target)]
        )
        time_ids = sizes[None].to(hidden.device).repeat(hidden.shape[0], 1)
        inputs = {"encoder_hidden_states": hidden, "text_embeds": pooled, "time_ids": time_ids}
        inputs |= request.guidance_inputs()
        return Conditions(inputs, halves=2 if request.guided else 1)

    def torch_pipeline(
        self, modules: Mapping[str, Any], companions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Any:
        import diffusers

        nets = [modules[name] for name in self.nets(modules).values()]
        make = diffusers.StableDiffusionXLControlNetPipeline if nets else diffusers.StableDiffusionXLPipeline
        if "unet" in modules and self.task({"unet": modules["unet"].config}) == "inpaint":
            make = diffusers.StableDiffusionXLInpaintPipeline
        pipeline = make(
            **{name: modules.get(name) for name in ("vae", "text_encoder", "text_encoder_2", "unet", "image_encoder")},
            **({"controlnet": nets} if nets else {}),
            **{name: companions.get(name) for name in self.companions},
            force_zeros_for_empty_prompt=options["force_zeros_for_empty_prompt"],
            add_watermarker=False,
        )
        return with_projections(pipeline)


FAMILY = StableDiffusionXL()


class _Texts:
    """Texts for both encoders."""

    def __init__(self, texts: Sequence[str], second: str | Sequence[str] | None) -> None:
        """second: texts for the second encoder, as in `further_texts`."""
        self.first = list(texts)
        self.second = further_texts(second, texts)

    def __add__(self, other: _Texts) -> _Texts:
        return _Texts([*self.first, *other.first], [*self.second, *other.second])

    def encoded(self, run: Run, companions: Mapping[str, Any], reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings of each text, (texts, tokens, both widths), and pooled embeddings of the second texts,
        (texts, width)."""
        import torch

        texts = {
            "text_encoder": (companions["tokenizer"], self.first),
            "text_encoder_2": (companions["tokenizer_2"], self.second),
        }
        encoded = encode(run, reading, texts)
        hidden = [each.hidden(last_but_one_layer(each.outputs)) for each in encoded.values()]
        return torch.cat(hidden, dim=-1), encoded["text_encoder_2"].whole("text_embeds")
