"""A checkpoint of the family in `other_families`, as diffusers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from sdflow.sources.architectures import companion_folder

OTHER_FAMILIES = Path(__file__).parent / "other_families"
CONFIGS = OTHER_FAMILIES / "sdflow_families/tiny_flux/architectures/flux-tiny"


def tiny_flux() -> FluxPipeline:
    """diffusers' pipeline of its configs, with random weights."""

    def config(component: str) -> dict[str, object]:
        found: dict[str, object] = json.loads((CONFIGS / component / "config.json").read_text("utf-8"))
        return found

    torch.manual_seed(0)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(CONFIGS / "scheduler"),
        text_encoder=CLIPTextModel(CLIPTextConfig.from_dict(config("text_encoder"))),
        text_encoder_2=T5EncoderModel(T5Config.from_dict(config("text_encoder_2"))),
        tokenizer=CLIPTokenizer.from_pretrained(companion_folder("sd35-tiny", "tokenizer")),
        tokenizer_2=AutoTokenizer.from_pretrained(companion_folder("sd35-tiny", "tokenizer_3")),
        transformer=FluxTransformer2DModel.from_config(config("transformer")),
        vae=AutoencoderKL.from_config(config("vae")),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
