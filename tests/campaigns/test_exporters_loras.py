"""LoRAs as people have them, merged by sdflow and by the programs themselves: the same weights, or refused by name.

By the names of every program (tests/support/lora_spellings.py), and by random choices of PEFT's options in each of the
four ways in which PEFT and diffusers save them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_spellings import SPELLINGS, Tensors, states
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.sources import (
    Checkpoint,
    PlainDigests,
    load_module,
    load_pipeline,
    lora_submodels,
    open_checkpoint,
    read_lora,
)
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.weights.lora import merged_weight

pytestmark = pytest.mark.slow

Weights = dict[str, Tensors]
SEEDS = range(int(os.environ.get("SDFLOW_CAMPAIGN_SEED", "0")), int(os.environ.get("SDFLOW_CAMPAIGN_SEED", "0")) + 30)
TARGETS: dict[str, tuple[Any, ...]] = {
    "unet": (["to_q", "to_v"], r"mid_block\..*(to_k|proj_in|conv1)", ["conv_in", "time_emb_proj"], ["conv1", "to_out.0"]),
    "text_encoder": (["q_proj", "fc1"], r".*layers\.1\..*(k_proj|fc2)", ["out_proj"], ["q_proj", "k_proj", "v_proj"]),
}  # fmt: skip
MERGED: dict[str, tuple[Any, ...]] = {
    "r": (1, 4, 7),
    "lora_alpha": (1, 6, 16),
    "use_rslora": (True,),
    "use_dora": (True,),
    "rank_pattern": ({"to_q": 2, "q_proj": 2}, {r".*(conv1|fc1)": 5}),
    "alpha_pattern": ({"to_v": 3, "fc1": 5}, {r".*proj.*": 2}),
    "layers_to_transform": ([0], [0, 1]),
    "fan_in_fan_out": (True,),
    "lora_dropout": (0.3,),
    "init_lora_weights": (True, "gaussian"),
}
"""Options, and values of them with which sdflow merges."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("all", "lora_only"),
    "lora_bias": (True,),
    "modules_to_save": (["conv_out", "final_layer_norm"],),
    "init_lora_weights": ("pissa", "pissa_niter_2", "olora"),
    "use_qalora": (True,),
}


@pytest.fixture(scope="module", params=["sd15-tiny", "sdxl-tiny"])
def opened(request: pytest.FixtureRequest) -> tuple[Checkpoint, Weights]:
    found = open_checkpoint(f"synthetic:{request.param}", digests=PlainDigests(), download=False)
    return found, states(found)


def merged_by_sdflow(checkpoint: Checkpoint, weights: Weights, path: Path) -> Weights:
    shapes = {name: {key: tuple(each.shape) for key, each in state.items()} for name, state in weights.items()}
    merged = {name: dict(state) for name, state in weights.items()}
    for name, layers in read_lora(path, shapes, checkpoint.family.name).items():
        for key, layer in layers.items():
            merged[name][key] = torch.from_numpy(merged_weight(weights[name][key].numpy(), [(layer, 1.0)]))
    return merged


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.linalg.vector_norm(ours[key] - value) <= 2e-6 * torch.linalg.vector_norm(value), key


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_module_in_every_spelling_merges_as_peft_merges_it(
    name: str, opened: tuple[Checkpoint, Weights], tmp_path: Path
) -> None:
    checkpoint, weights = opened
    made = SPELLINGS[name](weights)
    path = tmp_path / "lora.safetensors"
    save_file(made.tensors, path)
    ours = merged_by_sdflow(checkpoint, weights, path)
    layers = 0
    for submodel in weights:
        module = load_module(submodel, checkpoint.submodels[submodel].load)
        denoiser = checkpoint.submodels["unet"].load["config"]
        layers += merge_lora(module, checkpoint.family.part(submodel).component, checkpoint.family, denoiser, path, 1.0)
        assert_equal(ours[submodel], module.state_dict())
    assert layers == len(made.layers)


def by_peft(checkpoint: Checkpoint, submodel: str, config: Any, folder: Path) -> tuple[Path, Tensors]:
    from peft import get_peft_model

    wrapped = get_peft_model(load_module(submodel, checkpoint.submodels[submodel].load), config)
    randomize(wrapped)
    wrapped.save_pretrained(folder)
    return folder / "adapter_model.safetensors", wrapped.merge_and_unload(safe_merge=True).state_dict()


def by_save_lora_weights(checkpoint: Checkpoint, submodel: str, config: Any, folder: Path) -> tuple[Path, Tensors]:
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    pipeline = load_pipeline(checkpoint)
    module = getattr(pipeline, submodel)
    module.add_adapter(config)
    randomize(module)
    layers = {f"{submodel}_lora_layers": get_peft_model_state_dict(module)}
    pipeline.save_lora_weights(folder, **layers, **_collate_lora_metadata({submodel: module}))
    return next(folder.glob("*.safetensors")), fused(module)


def by_the_model(checkpoint: Checkpoint, submodel: str, config: Any, folder: Path) -> tuple[Path, Tensors]:
    """diffusers' save_lora_adapter; of a text encoder, transformers' save_pretrained."""
    module = load_module(submodel, checkpoint.submodels[submodel].load)
    module.add_adapter(config)
    randomize(module)
    getattr(module, "save_lora_adapter", module.save_pretrained)(folder)
    return next(folder.glob("*.safetensors")), fused(module)


def randomize(module: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1


def fused(module: Any) -> Tensors:
    from diffusers.utils.peft_utils import recurse_remove_peft_layers
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [each for each in module.modules() if isinstance(each, BaseTunerLayer)]:
        layer.merge(safe_merge=True)
    recurse_remove_peft_layers(module)
    merged: Tensors = module.state_dict()
    return merged


WAYS: dict[str, Callable[[Checkpoint, str, Any, Path], tuple[Path, Tensors]]] = {
    "PEFT": by_peft,
    "save_lora_weights": by_save_lora_weights,
    "the model": by_the_model,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("submodel", TARGETS)
def test_peft_options_are_merged_as_peft_merges_them_or_refused(
    seed: int, submodel: str, opened: tuple[Checkpoint, Weights], tmp_path: Path
) -> None:
    from peft import LoraConfig

    checkpoint, weights = opened
    draw = random.Random(f"{seed} {submodel} {checkpoint.reference}")
    way = draw.choice([*WAYS])
    fields = {"target_modules": draw.choice(TARGETS[submodel]), "init_lora_weights": False}
    fields |= {name: draw.choice(MERGED[name]) for name in draw.sample([*MERGED], draw.randint(1, 4))}
    if isinstance(fields["target_modules"], str):
        fields.pop("layers_to_transform", None)
    refused = draw.random() < 0.3
    if refused:
        name = draw.choice([*REFUSED])
        fields[name] = draw.choice(REFUSED[name])
    try:
        path, theirs = WAYS[way](checkpoint, submodel, LoraConfig(**fields), tmp_path)
    except (ValueError, TypeError, NotImplementedError, IndexError) as error:
        assert refused or "layers_to_transform" in fields, f"PEFT itself refuses {fields}: {error}"
        pytest.skip(f"PEFT itself refuses: {error}"[:200])
    told = json.dumps({"way": way, **fields}, default=str)
    if refused:
        with pytest.raises(CheckpointError, match="is not supported"):
            lora_submodels(path)
        return
    assert lora_submodels(path) == (submodel,), told
    ours = merged_by_sdflow(checkpoint, weights, path)
    assert_equal(ours[submodel], theirs)
