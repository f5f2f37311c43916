"""A checkpoint of Z-Image's tiny architecture, as diffusers saves it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from sdflow.sources.architectures import architecture_config, companion_folder

NAME = "z-image-tiny"


def tiny_z_image(seed: int = 0, **scheduler: Any) -> ZImagePipeline:
    """diffusers' pipeline with random weights. scheduler: entries of its config, over those of Z-Image-Turbo."""
    torch.manual_seed(seed)
    transformer = ZImageTransformer2DModel.from_config(architecture_config(NAME, "transformer"))
    with torch.no_grad():  # the library's class makes these of zeros
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            token.normal_()
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config({**architecture_config(NAME, "scheduler"), **scheduler}),
        text_encoder=Qwen3Model(Qwen3Config.from_dict(architecture_config(NAME, "text_encoder"))),
        tokenizer=AutoTokenizer.from_pretrained(companion_folder(NAME, "tokenizer")),
        transformer=transformer,
        vae=AutoencoderKL.from_config(architecture_config(NAME, "vae")),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
