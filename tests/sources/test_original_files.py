"""The single files that the tests write are those that diffusers reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from original_layout import stable_diffusion_2, stable_diffusion_xl
from safetensors.torch import save_file

from sdflow.sources.architectures import architecture_config, architecture_index, companion_folder


def filled(made: Any, config: dict[str, Any]) -> Any:
    """A module of this class and config, with random weights."""
    torch.manual_seed(0)
    module = made.from_config(config) if hasattr(made, "from_config") else made(made.config_class.from_dict(config))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("architecture", ["sd21-tiny", "sdxl-tiny"])
def test_diffusers_reads_what_was_written(architecture: str, tmp_path: Path) -> None:
    import diffusers
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    classes = {
        "unet": diffusers.UNet2DConditionModel,
        "vae": diffusers.AutoencoderKL,
        "text_encoder": CLIPTextModel,
    }
    companions = {
        "tokenizer": CLIPTokenizer.from_pretrained(companion_folder(architecture, "tokenizer")),
        "scheduler": getattr(diffusers, architecture_index(architecture)["scheduler"][1]).from_pretrained(
            companion_folder(architecture, "scheduler")
        ),
    }
    pipeline_class, written = diffusers.StableDiffusionPipeline, stable_diffusion_2
    if architecture == "sdxl-tiny":
        pipeline_class, written = diffusers.StableDiffusionXLPipeline, stable_diffusion_xl
        classes["text_encoder_2"] = CLIPTextModelWithProjection
        companions["tokenizer_2"] = CLIPTokenizer.from_pretrained(companion_folder(architecture, "tokenizer_2"))
    modules = {name: filled(made, architecture_config(architecture, name)) for name, made in classes.items()}
    save_file(written(*modules.values()), tmp_path / "model.safetensors")
    pipeline = pipeline_class.from_single_file(
        str(tmp_path / "model.safetensors"),
        config=str(companion_folder(architecture, "scheduler").parent),
        local_files_only=True,
        **companions,
    )
    for name, module in modules.items():
        found, expected = getattr(pipeline, name).state_dict(), module.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
