"""Each field of the installed PEFT's LoraConfig is honoured, or the file is refused by name, or the field changes no merge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.sources import (
    Checkpoint,
    PlainDigests,
    find_lora,
    load_module,
    lora_delta,
    lora_digest,
    lora_submodels,
    open_checkpoint,
    read_lora,
    require_made_for,
)
from sdflow.sources.loras.adapter_kinds import LOHA_CONFIG, LOKR_CONFIG, LORA_CONFIG
from sdflow.sources.loras.peft_metadata import METADATA_KEY
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.weights.lora import merged_weight

TARGETS = r"mid_block\..*(to_q|to_k|proj_in|conv1)"
REFUSED: dict[str, Any] = {
    "peft_type": "OFT",
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["conv_out"],
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [5],
    "target_parameters": ["conv_in.weight"],
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"samples": 4},
    "velora_config": {"num_groups": 2},
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "megatron_config": {"tensor_model_parallel_size": 2},
}
INITS = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
NO_EFFECT: dict[str, Any] = {
    "qalora_group_size": 8,
    "megatron_core": "another.core",
    "loftq_config": {"loftq_bits": 8},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "target_modules": ["to_q"],
    "exclude_modules": ["to_out"],
    "layers_to_transform": [0],
    "layers_pattern": ["attentions"],
    "fan_in_fan_out": True,
    "lora_dropout": 0.5,
    "inference_mode": True,
    "runtime_config": {"ephemeral_gpu_offload": False},
    "ensure_weight_tying": False,
    "task_type": "FEATURE_EXTRACTION",
    "peft_version": "0.1",
    "base_model_name_or_path": "somebody/something",
    "revision": "main",
}
HONOURED: dict[str, Any] = {
    "r": 6,
    "lora_alpha": 10,
    "rank_pattern": {"to_q": 2, r".*conv1": 5},
    "alpha_pattern": {"to_k": 7, r"mid_block\.resnets\.1.*": 3},
    "use_rslora": True,
    "use_dora": True,
    "auto_mapping": {"base_model_class": "UNet2DConditionModel"},
}


@pytest.fixture(scope="module")
def state(tiny: Checkpoint) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_module("unet", tiny.submodels["unet"].load).state_dict()
    return found


def saved_by_peft(tiny: Checkpoint, folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """A LoRA that PEFT's own save_pretrained wrote; returns the weights as PEFT merges them at scale 1."""
    module = load_module("unet", tiny.submodels["unet"].load)
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "init_lora_weights": False} | fields)
    torch.manual_seed(0)
    wrapped = get_peft_model(module, config)
    wrapped.save_pretrained(folder)
    merged: dict[str, torch.Tensor] = wrapped.merge_and_unload(safe_merge=True).state_dict()
    return merged


def read(path: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    found = dict(state)
    for key, layer in read_lora(path, {"unet": shapes})["unet"].items():
        found[key] = torch.from_numpy(merged_weight(state[key].numpy(), [(layer, 1.0)]))
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for key, tensor in one.items():
        assert torch.linalg.vector_norm(tensor - other[key]) <= 1e-6 * torch.linalg.vector_norm(tensor), key


def change(folder: Path, **fields: Any) -> Path:
    """Another configuration beside the same tensors."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder / "adapter_model.safetensors"


def test_every_field_of_the_installed_peft_is_decided() -> None:
    """A field that is new: look at what it does to a merge, then give it a row in sdflow/sources/loras/adapter_kinds.py."""
    fields = {field.name: field for field in dataclasses.fields(LoraConfig)}
    assert set(LORA_CONFIG) == set(fields)
    by_decision = {
        decision: {name for name, field in LORA_CONFIG.items() if field.decision == decision}
        for decision in ("honoured", "refused", "without effect")
    }
    assert by_decision["refused"] == {*REFUSED, "init_lora_weights"}, "each is tried below"
    assert by_decision["without effect"] == set(NO_EFFECT)
    assert by_decision["honoured"] == set(HONOURED)
    assert all(field.why.endswith(".") for field in LORA_CONFIG.values())


@pytest.mark.parametrize(("config", "fields"), [(LoHaConfig, LOHA_CONFIG), (LoKrConfig, LOKR_CONFIG)])
def test_every_field_of_lycoris_kinds_is_decided(config: Any, fields: dict[str, Any]) -> None:
    assert set(fields) == {field.name for field in dataclasses.fields(config)}
    assert {name for name, field in fields.items() if field.decision == "refused"} == {"modules_to_save"}


def test_what_peft_sets_by_itself_is_plain(tiny: Checkpoint, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    merged = saved_by_peft(tiny, tmp_path)
    path = find_lora(str(tmp_path), download=False)
    assert lora_submodels(path) == ("unet",)
    assert_equal(read(path, state), merged)


@pytest.mark.parametrize("field", HONOURED)
def test_what_is_honoured_merges_as_peft_merges_it(
    field: str, tiny: Checkpoint, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    merged = saved_by_peft(tiny, tmp_path, **{field: HONOURED[field]})
    path = tmp_path / "adapter_model.safetensors"
    assert_equal(read(path, state), merged)
    module = load_module("unet", tiny.submodels["unet"].load)
    assert merge_lora(module, "unet", tiny.family, tiny.submodels["unet"].load["config"], path, 1.0) > 5
    assert_equal(module.state_dict(), merged)


@pytest.fixture(scope="module")
def plain(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, saved_by_peft(tiny, folder)


def copied(plain: tuple[Path, dict[str, torch.Tensor]], folder: Path) -> Path:
    for path in plain[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("field", NO_EFFECT)
def test_what_is_without_effect_changes_no_weight(
    field: str, plain: tuple[Path, dict[str, torch.Tensor]], state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = change(copied(plain, tmp_path), **{field: NO_EFFECT[field]})
    assert_equal(read(path, state), plain[1])


@pytest.mark.parametrize("field", ["fan_in_fan_out", "lora_dropout", "layers_to_transform", "exclude_modules"])
def test_peft_itself_merges_the_same_without_them(
    field: str, tiny: Checkpoint, plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Trained with the field, the tensors of one file; the field is then taken out of the configuration."""
    from peft import PeftModel

    fields = {"target_modules": ["to_q", "to_k"], "layers_pattern": "attentions"} if field.startswith("layers") else {}
    if field == "exclude_modules":
        fields = {"exclude_modules": ["mid_block.resnets.1.conv1"]}
    merged = saved_by_peft(tiny, tmp_path, **{field: NO_EFFECT[field]} | fields)
    if field != "exclude_modules":  # PEFT needs it to find the modules; the tensors alone say the rest
        path = change(tmp_path, **{field: None if field.startswith("layers") else 0})
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert not config[field]
    else:
        path = tmp_path / "adapter_model.safetensors"
    base = load_module("unet", tiny.submodels["unet"].load)
    assert_equal(read(path, base.state_dict()), merged)
    if field in ("fan_in_fan_out", "lora_dropout"):
        assert_equal(PeftModel.from_pretrained(base, str(tmp_path)).merge_and_unload().state_dict(), merged)


@pytest.mark.parametrize(
    ("field", "value"), [*REFUSED.items(), *(("init_lora_weights", way) for way in INITS)], ids=str
)
def test_what_is_refused_is_named(
    field: str, value: Any, plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = change(copied(plain, tmp_path), **{field: value})
    named = {"peft_type": "OFT"}.get(field, field)
    with pytest.raises(
        CheckpointError, match=rf"{named}.* is not supported \((peft_type )?in its adapter_config\.json\)"
    ):
        lora_submodels(path)


@pytest.mark.parametrize("way", ["olora", "pissa"])
def test_such_a_beginning_changes_the_weights_below(way: str, tiny: Checkpoint, tmp_path: Path) -> None:
    """That is why it is refused: the tensors alone do not give what was trained."""
    before = load_module("unet", tiny.submodels["unet"].load)
    kept = {key: tensor.clone() for key, tensor in before.state_dict().items()}
    wrapped = get_peft_model(before, LoraConfig(r=2, target_modules=r"mid_block\..*to_q", init_lora_weights=way))
    wrapped.save_pretrained(tmp_path)
    changed = wrapped.get_base_model().state_dict()
    key = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    assert not torch.equal(changed[f"{key}.base_layer.weight"], kept[f"{key}.weight"])
    with pytest.raises(CheckpointError, match="init_lora_weights"):
        lora_submodels(tmp_path / "adapter_model.safetensors")


def test_a_field_of_tomorrow_is_named_where_it_is_set(
    plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = change(copied(plain, tmp_path), use_quantum=False, more_config=None)
    assert lora_submodels(path) == ("unet",)
    with pytest.raises(CheckpointError, match=r"use_quantum = true is not supported .*does not know"):
        lora_submodels(change(tmp_path, use_quantum=True))


def test_pefts_configuration_is_a_part_of_its_lora(plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path = copied(plain, tmp_path) / "adapter_model.safetensors"
    before = lora_digest(path, PlainDigests())
    assert lora_digest(change(tmp_path, lora_alpha=3), PlainDigests()) != before
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json, which has its alpha, is missing next to it"):
        lora_submodels(path)


def test_patterns_of_a_text_encoder_are_for_the_names_that_peft_saw(tiny: Checkpoint, tmp_path: Path) -> None:
    """Before transformers 5 these began with text_model."""
    load = tiny.submodels["text_encoder"].load
    before = {key: tensor.clone() for key, tensor in load_module("text_encoder", load).state_dict().items()}
    module = "encoder.layers.0.self_attn.q_proj"
    factors = {"lora_A": torch.randn(4, 32), "lora_B": torch.randn(32, 4)}
    named = {f"base_model.model.text_model.{module}.{role}.weight": tensor for role, tensor in factors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    pattern = {f"^text_model.{module}": 2}
    config = {"r": 4, "lora_alpha": 16, "alpha_pattern": pattern, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    path = tmp_path / "adapter_model.safetensors"
    shapes = {key: tuple(tensor.shape) for key, tensor in before.items()}
    assert read_lora(path, {"text_encoder": shapes})["text_encoder"][f"{module}.weight"].scale == 0.5
    merged = load_module("text_encoder", load)
    assert merge_lora(merged, "text_encoder", tiny.family, tiny.submodels["unet"].load["config"], path, 1.0) == 1
    expected = before[f"{module}.weight"] + 0.5 * factors["lora_B"] @ factors["lora_A"]
    assert torch.allclose(merged.state_dict()[f"{module}.weight"], expected, atol=1e-5)


def test_a_configuration_in_the_header_goes_before_one_beside_the_file(
    plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = change(copied(plain, tmp_path), lora_alpha="no number")
    save_file(load_file(path), path, {METADATA_KEY: json.dumps({"unet.r": 4, "unet.lora_alpha": 12})})
    assert lora_submodels(path) == ("unet",)


@pytest.mark.parametrize("submodel", ["text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("says_its_class", [True, False])
def test_a_text_encoder_of_xl_is_told_by_its_class(submodel: str, says_its_class: bool, tmp_path: Path) -> None:
    """PEFT's names do not tell one from the other. Without the class it is taken for the first."""
    xl = open_checkpoint("synthetic:sdxl-tiny", digests=PlainDigests(), download=False)
    module = load_module(submodel, xl.submodels[submodel].load)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    wrapped = get_peft_model(
        module, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path)
    merged = wrapped.merge_and_unload(safe_merge=True).state_dict()
    path = tmp_path / "adapter_model.safetensors"
    if not says_its_class:
        change(tmp_path, auto_mapping=None)
        assert lora_submodels(path) == ("text_encoder",)
        if submodel == "text_encoder_2":
            with pytest.raises(CheckpointError, match="wide"):
                require_made_for(path, xl)
            return
    assert lora_submodels(path) == (submodel,)
    require_made_for(path, xl)
    found = dict(before)
    shapes = {key: tuple(tensor.shape) for key, tensor in before.items()}
    for key, layer in read_lora(path, {submodel: shapes}, xl.family.name)[submodel].items():
        found[key] = before[key] + torch.from_numpy(lora_delta(layer, shapes[key], 1.0))
    assert_equal(found, merged)
    proved = load_module(submodel, xl.submodels[submodel].load)
    assert merge_lora(proved, submodel, xl.family, xl.submodels["unet"].load["config"], path, 1.0) >= 4
    assert_equal(proved.state_dict(), merged)


def test_peft_merges_what_is_refused_into_a_model_that_is_then_read(tiny: Checkpoint, tmp_path: Path) -> None:
    """As the message says: merge_and_unload, save_pretrained, `components`."""
    module = load_module("unet", tiny.submodels["unet"].load)
    config = LoraConfig(r=4, target_modules=TARGETS, bias="lora_only", init_lora_weights=False)
    wrapped = get_peft_model(module, config)
    wrapped.save_pretrained(tmp_path / "lora")
    with pytest.raises(CheckpointError, match='bias = "lora_only" is not supported') as caught:
        lora_submodels(tmp_path / "lora" / "adapter_model.safetensors")
    assert "merge_and_unload" in str(caught.value.remedy) and "`components`" in str(caught.value.remedy)
    merged = PeftModel.from_pretrained(load_module("unet", tiny.submodels["unet"].load), str(tmp_path / "lora"))
    merged.merge_and_unload().save_pretrained(tmp_path / "unet")
    opened = open_checkpoint(
        tiny.reference, digests=PlainDigests(), download=False, components={"unet": str(tmp_path / "unet")}
    )
    assert_equal(
        load_module("unet", opened.submodels["unet"].load).state_dict(), wrapped.merge_and_unload().state_dict()
    )
