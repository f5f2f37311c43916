"""What files in low bits are held to: read by `gguf`, safetensors and PyTorch, whole and a parameter at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from low_bit_files import T, mixed, qwen3_by_llama_cpp, t5_by_llama_cpp, write_fp8_scaled, write_gguf
from original_layout import flux_tensors, unet_tensors

from sdflow.families import part_of
from sdflow.sources import PlainDigests, load_module, open_checkpoint
from sdflow.verify.pretrained import in_low_bits, read_by_library, reader

KINDS = (T.Q8_0, T.Q5_0, T.BF16, T.Q6_K)
CASES = {
    "transformer": ("synthetic:flux1-dev-tiny", "transformer", "gguf", flux_tensors, "flux"),
    "unet": ("synthetic:sd15-tiny", "unet", "gguf", unet_tensors, "sd1"),
    "t5": (
        "synthetic:flux1-dev-tiny",
        "text_encoder_2",
        "gguf",
        lambda each: t5_by_llama_cpp(each.state_dict()),
        "t5encoder",
    ),
    "qwen3": (
        "synthetic:flux2-tiny",
        "text_encoder",
        "gguf",
        lambda each: qwen3_by_llama_cpp(each.state_dict()),
        "qwen3",
    ),
    "fp8_scaled": ("synthetic:flux1-dev-tiny", "transformer", "safetensors", flux_tensors, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_reads_the_values_that_are_built(case: str, tmp_path: Path) -> None:
    model, name, suffix, tensors, architecture = CASES[case]
    path = tmp_path / f"x.{suffix}"
    module = load_module(name, opened(model).submodels[name].load)
    if suffix == "gguf":
        write_gguf(path, tensors(module), mixed(*KINDS), architecture)
    else:
        write_fp8_scaled(path, tensors(module))
    load = opened(model, components={name: str(path)}).submodels[name].load
    built = load_module(name, load).state_dict()
    shapes = {key: tuple(each.shape) for key, each in built.items()}
    assert in_low_bits(load)
    whole, one = read_by_library(part_of(load, name), load, shapes), reader(name, part_of(load, name), load, shapes)
    assert whole.keys() == built.keys()
    for key, values in built.items():
        assert torch.equal(whole[key], values) and torch.equal(one(key), values), key


def opened(model: str, **options: Any) -> Any:
    return open_checkpoint(model, digests=PlainDigests(), download=False, **options)
