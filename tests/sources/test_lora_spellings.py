"""Every module of Stable Diffusion 1.5 and XL, in the names of every program that saves LoRAs: each gets its own factors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_spellings import SPELLINGS, Tensors, states
from safetensors.torch import save_file

from sdflow.sources import (
    Checkpoint,
    PlainDigests,
    lora_delta,
    lora_submodels,
    open_checkpoint,
    read_lora,
    require_made_for,
)

Opened = tuple[Checkpoint, dict[str, Tensors]]


@pytest.fixture(scope="module", params=["sd15-tiny", "sdxl-tiny"])
def opened(request: pytest.FixtureRequest) -> Opened:
    found = open_checkpoint(f"synthetic:{request.param}", digests=PlainDigests(), download=False)
    return found, states(found)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_module_gets_its_own_factors(name: str, opened: Opened, tmp_path: Path) -> None:
    checkpoint, weights = opened
    made = SPELLINGS[name](weights)
    path = tmp_path / "lora.safetensors"
    save_file(made.tensors, path)
    assert set(lora_submodels(path)) == {submodel for submodel, _ in made.layers}
    require_made_for(path, checkpoint)
    shapes = {submodel: {key: tuple(each.shape) for key, each in state.items()} for submodel, state in weights.items()}
    found = read_lora(path, shapes, checkpoint.family.name)
    layers = {
        (submodel, key.removesuffix(".weight")): (layer, shapes[submodel][key])
        for submodel, each in found.items()
        for key, layer in each.items()
    }
    assert layers.keys() == made.layers.keys()
    assert len(layers) > 40
    for place, expected in made.layers.items():
        layer, shape = layers[place]
        delta = torch.from_numpy(lora_delta(layer, shape, 1.0)).double()
        assert torch.linalg.vector_norm(delta - expected) <= 1e-6 * torch.linalg.vector_norm(expected), place


def test_a_name_is_for_the_same_submodel_in_every_process() -> None:
    """Several families share prefixes, as lora_unet_, and the order of a set of strings differs between processes."""
    name = "lora_unet_mid_block_attentions_0_proj_in.lora_down.weight"
    code = f"from sdflow.sources.loras.lora_names import parse_name; print(parse_name({name!r}).submodel)"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (3, 4, 6, 8)
    }
    assert told == {"unet\n"}
