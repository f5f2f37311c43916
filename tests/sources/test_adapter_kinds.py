"""What is not merged is refused by its name, whoever asks: every such kind of PEFT's, made by PEFT itself; quantized factors."""

from __future__ import annotations

import inspect as signatures
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.inspection import inspect
from sdflow.sources import Checkpoint, find_lora, load_module, lora_submodels, read_lora
from sdflow.sources.loras.adapter_kinds import MERGE_WITH_PEFT, PEFT_TYPES, USE_A_LORA, kind_of_tensor

Tensors = dict[str, torch.Tensor]

FILE = "adapter_model.safetensors"
TARGETS = ["to_q", "to_k"]
SMALL: dict[str, Any] = {
    "r": 4,
    "rank": 4,
    "boft_block_size": 4,
    "oft_block_size": 4,
    "n_frequency": 10,
    "num_vectors": 8,
    "vector_length": 8,
    "block_size": 8,
    "total_step": 10,
    "feedforward_modules": [],
}
"""Options of PEFT's kinds, for layers 64 wide."""
NEEDS_MORE = (
    *("ADAMSS", "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"),
    *("P_TUNING", "SHADOW", "XLORA"),
)
"""Kinds that PEFT makes only with a language model, with LoRAs on disk or with scikit-learn: their configuration is tried
beside a plain LoRA's tensors."""


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.to_q(states) + self.to_k(states)
        return attended


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = Attention()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attn1(states)
        return attended


@cache
def wrapped(kind: str) -> Any:
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    fields = {name: SMALL[name] for name in signatures.signature(cls).parameters if name in SMALL}
    if "target_modules" in signatures.signature(cls).parameters:
        fields["target_modules"] = TARGETS
    if kind == "OFT":
        fields["r"] = 0
    if kind == "TRAINABLE_TOKENS":
        fields["token_indices"] = [1]
    return get_peft_model(Denoiser(), cls(**fields))


def test_every_kind_of_the_installed_peft_is_known() -> None:
    assert set(PEFT_TYPES) == {kind.value for kind in PeftType} - {"LORA"}


@pytest.mark.parametrize("kind", [kind for kind in PEFT_TYPES if kind not in NEEDS_MORE and not PEFT_TYPES[kind].read])
def test_what_peft_makes_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    made, known = wrapped(kind), PEFT_TYPES[kind]
    made.save_pretrained(tmp_path)
    path = find_lora(str(tmp_path), download=False)
    with pytest.raises(CheckpointError) as caught:
        lora_submodels(path)
    assert caught.value.what == f"{known.title} is not supported (peft_type in its adapter_config.json)"
    assert caught.value.remedy == (MERGE_WITH_PEFT if known.merges else USE_A_LORA)
    (found,) = inspect(tmp_path)
    assert (found.kind, found.details["algorithm"], found.workflow) == ("LoRA", known.title, None)
    assert f"sdflow does not merge it: {caught.value.what}." in found.notes
    # Without its configuration the tensors tell it too, or at least that they are no LoRA's.
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="is not supported|do not belong to a LoRA"):
        lora_submodels(path)
    kinds = {kind_of_tensor(name, tuple(each.shape)) for name, each in load_file(path).items()}
    assert known.title in kinds, "by its names alone"


@pytest.mark.parametrize("kind", [kind for kind in PEFT_TYPES if kind not in NEEDS_MORE])
def test_peft_merges_what_the_message_sends_there(kind: str) -> None:
    made = wrapped(kind)
    if PEFT_TYPES[kind].merges:
        merged = made.merge_and_unload()
        assert {name for name, _ in merged.named_parameters()} >= {"attn1.to_q.weight", "attn1.to_k.weight"}
    else:
        with pytest.raises((NotImplementedError, AttributeError, ValueError, TypeError)):
            made.merge_and_unload()


@pytest.mark.parametrize("kind", [*NEEDS_MORE, "TOMORROW"])
def test_the_configuration_is_read_before_the_names(kind: str, tmp_path: Path) -> None:
    """Tensors of a plain LoRA, which would merge."""
    made = get_peft_model(Denoiser(), LoraConfig(r=4, target_modules=TARGETS))
    made.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": kind, "some_field_of_its_own": [1]}))
    title = PEFT_TYPES[kind].title if kind in PEFT_TYPES else "TOMORROW, which this version of sdflow does not know,"
    with pytest.raises(CheckpointError) as caught:
        lora_submodels(tmp_path / FILE)
    assert caught.value.what == f"{title} is not supported (peft_type in its adapter_config.json)"


def test_several_adapters_that_peft_saved_together_are_named_by_their_folders(tmp_path: Path) -> None:
    made = get_peft_model(Denoiser(), LoraConfig(r=4, target_modules=TARGETS), adapter_name="ink")
    made.add_adapter("wood", LoraConfig(r=2, target_modules=TARGETS))
    made.save_pretrained(tmp_path, selected_adapters=["ink", "wood"])
    with pytest.raises(CheckpointError) as caught:
        find_lora(str(tmp_path), download=False)
    assert caught.value.what == "holds LoRAs in 2 of its folders: ink, wood"
    assert f"ink/{FILE}" in str(caught.value.remedy)
    for name, rank in (("ink", "4"), ("wood", "2")):
        assert find_lora(str(tmp_path / name), download=False) == tmp_path / name / FILE
        assert find_lora(str(tmp_path), f"{name}/{FILE}", download=False) == tmp_path / name / FILE
        (found,) = inspect(tmp_path / name)
        assert found.details["rank"] == rank
    assert [Path(found.path).parent.name for found in inspect(tmp_path)] == ["ink", "wood"]


def test_a_folder_with_a_pickle_alone_says_so(tmp_path: Path) -> None:
    made = get_peft_model(Denoiser(), LoraConfig(r=4, target_modules=TARGETS))
    made.save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(CheckpointError, match=r"but adapter_model\.bin: pickled LoRAs are not supported"):
        find_lora(str(tmp_path), download=False)


# The types of the values

MODULE = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
STEM = "lora_unet_" + MODULE.replace(".", "_")


@pytest.fixture(scope="module")
def shapes(tiny: Checkpoint) -> dict[str, dict[str, tuple[int, ...]]]:
    state = load_module("unet", tiny.submodels["unet"].load).state_dict()
    return {"unet": {key: tuple(tensor.shape) for key, tensor in state.items()}}


def written(folder: Path, dtype: torch.dtype, alpha: torch.Tensor | None = None) -> Path:
    down, up = torch.arange(256).reshape(4, 64) % 5, torch.arange(256).reshape(64, 4) % 3
    tensors = {f"{STEM}.lora_down.weight": down.to(dtype), f"{STEM}.lora_up.weight": up.to(dtype)}
    save_file(tensors | ({} if alpha is None else {f"{STEM}.alpha": alpha}), folder / "x.safetensors")
    return folder / "x.safetensors"


QUANTIZED = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_factors_are_refused_from_the_header(dtype: torch.dtype, tmp_path: Path) -> None:
    path = written(tmp_path, dtype)
    with pytest.raises(CheckpointError, match=rf"tensor {STEM}\.lora_(down|up)\.weight is of dtype") as caught:
        lora_submodels(path)
    assert caught.value.remedy == "Convert it to F32, F16 or BF16."
    (found,) = inspect(path)
    assert f"sdflow does not merge it: {caught.value.what}." in found.notes
    assert found.workflow is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_type_of_floats_is_read(dtype: torch.dtype, shapes: Any, tmp_path: Path) -> None:
    layer = read_lora(written(tmp_path, dtype), shapes)["unet"][f"{MODULE}.weight"]
    assert (layer.up.max(), layer.down.max(), layer.scale) == (2, 4, 1)


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize("dtype", [*WHOLE, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_alpha_may_be_a_whole_number(
    dtype: torch.dtype, shape: tuple[int, ...], shapes: Any, tmp_path: Path
) -> None:
    """`torch.tensor(2)`, as trainers write an alpha that their user gave as a whole number."""
    path = written(tmp_path, torch.float16, torch.tensor(2).to(dtype).reshape(shape))
    assert read_lora(path, shapes)["unet"][f"{MODULE}.weight"].scale == 0.5
    assert inspect(path)[0].details["alpha"] == "2"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn], ids=str)
def test_an_alpha_that_is_no_number_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    path = written(tmp_path, torch.float16, torch.tensor(1.0).to(dtype))
    with pytest.raises(CheckpointError, match=rf"tensor {STEM}\.alpha is of dtype"):
        lora_submodels(path)
