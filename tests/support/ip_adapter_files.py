"""Small IP-Adapters of random weights, in the files that they are published in, and their image encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from sdflow.sources.architectures import architecture_config

HIDDEN, QUERIES = 32, 6
"""Of the resampler of the adapters called plus."""


def save_encoder(folder: Path) -> Path:
    """The tiny image encoder, as transformers saves it."""
    torch.manual_seed(5)
    config = CLIPVisionConfig.from_dict(architecture_config("ip-adapter-tiny", "image_encoder"))
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


def tensors(architecture: str, *, plus: bool = False, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """What torch.save would pickle: the tensors of the projection, and those of the UNet under diffusers' numbers."""
    config = architecture_config(architecture, "unet")
    unet, width = UNet2DConditionModel.from_config(config), config["cross_attention_dim"]
    encoder = architecture_config("ip-adapter-tiny", "image_encoder")
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / shape[-1] ** 0.5

    def norm(name: str, size: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + some(size), f"{name}.bias": some(size)}

    if not plus:
        projection = {"proj.weight": some(4 * width, encoder["projection_dim"]), "proj.bias": some(4 * width)}
        projection |= norm("norm", width)
    else:
        projection = {
            "latents": some(1, QUERIES, HIDDEN),
            "proj_in.weight": some(HIDDEN, encoder["hidden_size"]),
            "proj_in.bias": some(HIDDEN),
            "proj_out.weight": some(width, HIDDEN),
            "proj_out.bias": some(width),
            **norm("norm_out", width),
        }
        for index in range(4):
            layer = f"layers.{index}"
            projection |= (
                norm(f"{layer}.0.norm1", HIDDEN) | norm(f"{layer}.0.norm2", HIDDEN) | norm(f"{layer}.1.0", HIDDEN)
            )
            projection |= {
                f"{layer}.0.to_q.weight": some(64, HIDDEN),
                f"{layer}.0.to_kv.weight": some(128, HIDDEN),
                f"{layer}.0.to_out.weight": some(HIDDEN, 64),
                f"{layer}.1.1.weight": some(4 * HIDDEN, HIDDEN),
                f"{layer}.1.3.weight": some(HIDDEN, 4 * HIDDEN),
            }
    matrices = {}
    for number, name in enumerate(unet.attn_processors):
        attention = unet.get_submodule(name.removesuffix(".processor"))
        if attention.is_cross_attention:
            for matrix in ("to_k_ip", "to_v_ip"):
                matrices[f"{number}.{matrix}.weight"] = 3 * some(attention.inner_dim, width)
    return {"image_proj": projection, "ip_adapter": matrices}


def save_adapter(file: Path, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    """As .safetensors, in which names are joined, or as .bin, a pickle of both parts."""
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".bin":
        torch.save({part: dict(each) for part, each in parts.items()}, file)
    else:
        save_file({f"{part}.{name}": each for part, found in parts.items() for name, each in found.items()}, file)
    return file


def with_adapters(pipeline: Any, folder: Path, *files: str) -> Any:
    """diffusers' pipeline with these adapters loaded by itself, and the image encoder of the folder."""
    pipeline.load_ip_adapter(
        str(folder), subfolder=[""] * len(files), weight_name=list(files), image_encoder_folder="image_encoder"
    )
    return pipeline
