"""A LoRA that cannot be merged is refused by `validate` with its place in the workflow, and by `plan` in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from safetensors.torch import save_file
from small_lora import write_lora
from started_python import Command

from sdflow.build.model_check import input_problems
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, WorkflowError
from sdflow.passes.registry import catalog
from sdflow.sources import find_lora
from sdflow.store import Cache

TARGETS = ["to_q"]
STEM = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"


def attention() -> torch.nn.Module:
    return torch.nn.ModuleDict({"to_q": torch.nn.Linear(64, 64)})


def of_vera(folder: Path) -> Path:
    get_peft_model(attention(), VeraConfig(r=4, target_modules=TARGETS)).save_pretrained(folder)
    return folder


def of_several(folder: Path) -> Path:
    made = get_peft_model(attention(), LoraConfig(r=4, target_modules=TARGETS), adapter_name="ink")
    made.add_adapter("wood", LoraConfig(r=2, target_modules=TARGETS))
    made.save_pretrained(folder, selected_adapters=["ink", "wood"])
    return folder


def quantized(folder: Path) -> Path:
    tensors = {f"{STEM}.lora_down.weight": (4, 64), f"{STEM}.lora_up.weight": (64, 4)}
    folder.mkdir()
    save_file({name: torch.ones(shape, dtype=torch.int8) for name, shape in tensors.items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


def workflow(folder: Path, *loras: Path) -> Path:
    path = folder / "w.yaml"
    lines = "".join(f"  - file: {lora}\n" for lora in loras)
    path.write_text(f"extends: base/tiny.yaml\ntarget: cpu\nloras:\n{lines}")
    return path


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (of_vera, "VeRA is not supported"),
        (quantized, "is of dtype I8"),
    ],
)
def test_validate_and_plan_say_the_same(make: Callable[[Path], Path], told: str, tmp_path: Path) -> None:
    loaded = load_workflow(workflow(tmp_path, make(tmp_path / "lora")), catalog=catalog())
    (problem,) = input_problems(loaded)
    assert (problem.file, problem.line) == (str(tmp_path / "w.yaml"), 4)
    with pytest.raises(CheckpointError) as caught:
        make_plan(loaded, Cache(tmp_path / "cache"))
    assert told in caught.value.what
    assert problem.message.endswith(caught.value.what) and problem.remedy == caught.value.remedy


def test_several_adapters_in_one_folder_are_named_and_one_can_be_chosen(tmp_path: Path) -> None:
    path = workflow(tmp_path, of_several(tmp_path / "saved"))
    with pytest.raises(WorkflowError) as caught:
        load_workflow(path, catalog=catalog())
    (problem,) = caught.value.problems
    assert problem.message == "'saved' holds LoRAs in 2 of its folders: ink, wood"
    assert problem.remedy == "weight_name: one of ink/adapter_model.safetensors, wood/adapter_model.safetensors"
    path.write_text(f"{path.read_text()}    weight_name: wood/adapter_model.safetensors\n")
    (pipeline,) = load_workflow(path, catalog=catalog()).pipelines
    found = find_lora(pipeline.loras[0].reference, pipeline.loras[0].weight_name, download=False)
    assert found == tmp_path / "saved" / "wood" / "adapter_model.safetensors"


def test_the_command_names_every_such_lora_and_leaves_sound_ones_alone(tmp_path: Path, sdflow: Command) -> None:
    sound = write_lora(tmp_path / "sound.safetensors")
    path = workflow(tmp_path, sound)
    assert sdflow("validate", str(path), folder=tmp_path).returncode == 0
    path = workflow(tmp_path, of_vera(tmp_path / "vera"), sound, quantized(tmp_path / "int8"))
    ended = sdflow("validate", str(path), "--json", folder=tmp_path)
    assert ended.returncode == 2
    assert [problem["line"] for problem in json.loads(ended.stdout)["problems"]] == [4, 6]
    assert "VeRA is not supported" in ended.stderr and "Traceback" not in ended.stderr


def test_a_lora_on_the_hub_is_left_to_the_run(tmp_path: Path) -> None:
    path = workflow(tmp_path, Path("hf:somebody/ink"))
    assert input_problems(load_workflow(path, catalog=catalog())) == []
