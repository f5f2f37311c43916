"""Files of the programs that people train and save LoRAs with: each merges as its program merges it, or is refused by name.

diffusers, PEFT and LyCORIS make their files here themselves. Those of kohya's sd-scripts, OneTrainer, ComfyUI and civitai, which
cannot be installed, are written after their sources: the names, the types and the metadata that they give.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.inspection import inspect
from sdflow.models.ldm_names import ldm_unet_names
from sdflow.sources import Checkpoint, load_module, load_pipeline, lora_submodels, read_lora
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.weights.lora import merged_weight

State = dict[str, torch.Tensor]
Weights = dict[str, State]

SUBMODELS = ("unet", "text_encoder")
UNET = re.compile(
    r"mid_block\.(resnets\.0\.(conv1|time_emb_proj)|attentions\.0\..*(attn1\.to_[qv]|ff\.net\.2|proj_in))"
)
TEXT = re.compile(r"encoder\.layers\.0\..*(q_proj|fc1)")
PRESET = """\
enable_conv = true
unet_target_module = []
unet_target_name = ["mid_block.resnets.0.conv1", "mid_block.resnets.0.time_emb_proj", "mid_block.attentions.0.proj_in"]
text_encoder_target_module = []
text_encoder_target_name = ["encoder.layers.0.self_attn.q_proj", "encoder.layers.0.mlp.fc1"]
"""
"""Of LyCORIS: a few layers of each kind."""
PRESET_WITH_NORM = PRESET.replace('proj_in"]', 'proj_in", "mid_block.attentions.0.norm"]')


@dataclass(frozen=True)
class Made:
    """A file, and the weights as its program merges it at scale 1; None where the program cannot be asked: PEFT is then."""

    path: Path
    merged: Weights | None = None


def modules(tiny: Checkpoint) -> dict[str, Any]:
    return {name: load_module(name, tiny.submodels[name].load) for name in SUBMODELS}


def states(found: dict[str, Any]) -> Weights:
    return {name: module.state_dict() for name, module in found.items()}


def random_factors(tiny: Checkpoint, rank: int = 4) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """(submodel, module) -> up and down."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, state in states(modules(tiny)).items():
        for key, weight in state.items():
            module = key.removesuffix(".weight")
            if module != key and (UNET if name == "unet" else TEXT).fullmatch(module):
                down = torch.randn((rank, *weight.shape[1:]), generator=generator) * 0.1
                up = torch.randn((len(weight), rank, *(1 for _ in weight.shape[2:])), generator=generator) * 0.1
                found[name, module] = (up, down)
    assert len(found) >= 7
    return found


# Made by the programs themselves


def by_diffusers(tiny: Checkpoint, folder: Path) -> Made:
    """Trained with PEFT in diffusers' modules, saved by save_lora_weights as diffusers' scripts do, loaded and fused again."""
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = load_pipeline(tiny)
    parts = {name: getattr(pipeline, name) for name in SUBMODELS}
    for name, module in parts.items():
        pattern = (UNET if name == "unet" else TEXT).pattern
        module.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=pattern, init_lora_weights=False))
    layers = {f"{name}_lora_layers": get_peft_model_state_dict(module) for name, module in parts.items()}
    pipeline.save_lora_weights(folder, **layers, **_collate_lora_metadata(parts))
    (path,) = folder.glob("*.safetensors")
    again = load_pipeline(tiny)
    again.load_lora_weights(str(folder), weight_name=path.name)
    again.fuse_lora()
    again.unload_lora_weights()
    return Made(path, {name: getattr(again, name).state_dict() for name in SUBMODELS})


def by_peft(tiny: Checkpoint, folder: Path) -> Made:
    from peft import LoraConfig, get_peft_model

    found = modules(tiny)
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=UNET.pattern, init_lora_weights=False)
    wrapped = get_peft_model(found["unet"], config)
    wrapped.save_pretrained(folder)
    merged = wrapped.merge_and_unload(safe_merge=True).state_dict()
    return Made(folder / "adapter_model.safetensors", {"unet": merged, "text_encoder": states(found)["text_encoder"]})


def by_unet_alone(tiny: Checkpoint, folder: Path) -> Made:
    """diffusers' save_lora_adapter, of one model: neither names nor fields of the configuration have it in front."""
    from peft import LoraConfig

    unet = modules(tiny)["unet"]
    unet.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=UNET.pattern, init_lora_weights=False))
    unet.save_lora_adapter(folder)
    (path,) = folder.glob("*.safetensors")
    fresh = modules(tiny)
    fresh["unet"].load_lora_adapter(str(folder), prefix=None, weight_name=path.name)
    fresh["unet"].fuse_lora()
    fresh["unet"].unload_lora()
    return Made(path, states(fresh))


def by_peft_of_text(tiny: Checkpoint, folder: Path) -> Made:
    from peft import LoraConfig, get_peft_model

    found = modules(tiny)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    wrapped = get_peft_model(found["text_encoder"], config)
    wrapped.save_pretrained(folder)
    merged = wrapped.merge_and_unload(safe_merge=True).state_dict()
    return Made(folder / "adapter_model.safetensors", {"unet": states(found)["unet"], "text_encoder": merged})


def written_by_lycoris(
    tiny: Checkpoint, folder: Path, preset: str = PRESET, alpha: float = 2.0, **options: Any
) -> Path:
    from lycoris.kohya import create_network

    (folder / "preset.toml").write_text(preset)
    found = modules(tiny)
    parts = found["text_encoder"], found["unet"]
    torch.manual_seed(0)
    network = create_network(1.0, 4, alpha, None, *parts, preset=str(folder / "preset.toml"), **options)
    network.apply_to(*parts, True, True)
    for parameter in network.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    path = folder / "lycoris.safetensors"
    network.save_weights(str(path), torch.float32, {"ss_network_module": "lycoris.kohya"})
    return path


def by_lycoris(**options: Any) -> Callable[[Checkpoint, Path], Made]:
    def make(tiny: Checkpoint, folder: Path) -> Made:
        from lycoris.kohya import create_network_from_weights

        path = written_by_lycoris(tiny, folder, **options)
        fresh = modules(tiny)
        parts = fresh["text_encoder"], fresh["unet"]
        network, tensors = create_network_from_weights(1.0, str(path), None, *parts)
        network.merge_to(*parts, tensors, torch.float32, "cpu")
        return Made(path, states(fresh))

    return make


def by_lycoris_as_dylora(tiny: Checkpoint, folder: Path) -> Made:
    """LyCORIS merges a random rank of it, and no convolution; in the file all ranks lie in one pair of factors."""
    return Made(written_by_lycoris(tiny, folder, algo="dylora", block_size=2, conv_dim=4))


# After their sources


def in_kohyas_names(tiny: Checkpoint, dtype: torch.dtype, alpha: float) -> State:
    """sd-scripts, networks/lora.py: LORA_PREFIX, the module's path with _ for every dot; an alpha beside each layer."""
    tensors: State = {}
    for (submodel, module), (up, down) in random_factors(tiny).items():
        prefix = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}[submodel]
        stem = prefix + module.replace(".", "_")
        tensors |= {f"{stem}.lora_up.weight": up.to(dtype), f"{stem}.lora_down.weight": down.to(dtype)}
        tensors[f"{stem}.alpha"] = torch.tensor(alpha, dtype=dtype)
    return tensors


def of_kohya(tiny: Checkpoint, folder: Path) -> Made:
    said = {"ss_network_module": "networks.lora", "ss_network_dim": "4", "ss_network_alpha": "2.0", "ss_v2": "False"}
    said |= {"ss_network_args": json.dumps({"conv_dim": "4", "conv_alpha": "1"}), "sshs_model_hash": "0" * 64}
    save_file(in_kohyas_names(tiny, torch.float16, 2.0), folder / "kohya.safetensors", said)
    return Made(folder / "kohya.safetensors")


def of_civitai(tiny: Checkpoint, folder: Path) -> Made:
    """Trained there, with kohya's scripts: https://github.com/Stability-AI/ModelSpec in the header."""
    said = {"modelspec.sai_model_spec": "1.0.0", "modelspec.architecture": "stable-diffusion-v1/lora"}
    said |= {
        "modelspec.title": "ink",
        "modelspec.trigger_phrase": "in ink",
        "ss_tag_frequency": json.dumps({"1_ink": {"ink": 3}}),
    }
    save_file(in_kohyas_names(tiny, torch.bfloat16, 4.0), folder / "civitai.safetensors", said)
    return Made(folder / "civitai.safetensors")


def of_onetrainer(tiny: Checkpoint, folder: Path) -> Made:
    """OneTrainer's LoRAModule: the same names, and an alpha; the header has ot_config and its revision beside modelspec."""
    said = {"ot_branch": "master", "ot_revision": "0" * 40, "ot_config": json.dumps({"lora_rank": 4}), "format": "pt"}
    save_file(in_kohyas_names(tiny, torch.float32, 1.0), folder / "onetrainer.safetensors", said)
    return Made(folder / "onetrainer.safetensors")


def of_comfyui(tiny: Checkpoint, folder: Path) -> Made:
    """ComfyUI's nodes_lora_extract.py with bias_diff off: the original UNet's names, in float16, without alphas."""
    names = ldm_unet_names(key.removesuffix(".weight") for key in states(modules(tiny))["unet"])
    tensors: State = {}
    for (submodel, module), (up, down) in random_factors(tiny).items():
        if submodel == "unet":
            stem = f"diffusion_model.{names.get(module, module)}"
            tensors |= {f"{stem}.lora_up.weight": up.half(), f"{stem}.lora_down.weight": down.half()}
    save_file(tensors, folder / "comfyui.safetensors")
    return Made(folder / "comfyui.safetensors")


def of_comfyui_with_biases(tiny: Checkpoint, folder: Path) -> Made:
    """bias_diff, on by default: diff_b for biases, diff for the weights of norms."""
    made = of_comfyui(tiny, folder)
    state = states(modules(tiny))["unet"]
    names = {"mid_block.resnets.0.norm1": "middle_block.0.in_layers.0", "conv_in": "input_blocks.0.0"}
    found = {}
    for module, name in names.items():
        found[f"diffusion_model.{name}.diff_b"] = torch.full_like(state[f"{module}.bias"], 0.1)
        if "norm" in module:
            found[f"diffusion_model.{name}.diff"] = torch.full_like(state[f"{module}.weight"], 0.2)
    save_file(load_file(made.path) | found, made.path)
    return made


EXPORTERS: dict[str, tuple[Callable[[Checkpoint, Path], Made], bool]] = {
    "diffusers": (by_diffusers, True),
    "diffusers, the UNet alone": (by_unet_alone, True),
    "PEFT": (by_peft, True),
    "PEFT, a text encoder": (by_peft_of_text, True),
    "LyCORIS, LoRA with convolutions": (by_lycoris(algo="lora", conv_dim=3, conv_alpha=1.0), True),
    "LyCORIS, rank-stabilized": (by_lycoris(algo="lora", rs_lora=True), True),
    "LyCORIS, with a scalar": (by_lycoris(algo="lora", use_scalar=True), True),
    "LyCORIS, DyLoRA": (by_lycoris_as_dylora, False),
    "LyCORIS, Tucker": (by_lycoris(algo="lora", use_tucker=True, conv_dim=3, conv_alpha=1.0), True),
    "LyCORIS, DoRA": (by_lycoris(algo="lora", dora_wd=True, conv_dim=3, conv_alpha=1.0), True),
    "LyCORIS, LoHa": (by_lycoris(algo="loha", alpha=4.0, conv_dim=3, conv_alpha=3.0), True),
    "LyCORIS, LoKr": (by_lycoris(algo="lokr", alpha=4.0, factor=4, conv_dim=3, conv_alpha=3.0), True),
    "LyCORIS, full": (by_lycoris(algo="full"), True),
    "LyCORIS, with norms": (by_lycoris(algo="lora", train_norm=True, preset=PRESET_WITH_NORM), True),
    "kohya": (of_kohya, False),
    "civitai": (of_civitai, False),
    "OneTrainer": (of_onetrainer, False),
    "ComfyUI": (of_comfyui, False),
    "ComfyUI, with biases": (of_comfyui_with_biases, False),
}
"""Name -> what makes its file; whether that is the program itself."""


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_file_merges_as_its_exporter_merges_it(name: str, tiny: Checkpoint, tmp_path: Path) -> None:
    make, itself = EXPORTERS[name]
    made = make(tiny, tmp_path)
    before, merged, layers = states(modules(tiny)), modules(tiny), 0
    for submodel, module in merged.items():
        denoiser = tiny.submodels["unet"].load["config"]
        layers += merge_lora(module, submodel, tiny.family, denoiser, made.path, 1.0)
    assert (made.merged is not None) == itself
    shapes = {submodel: {key: tuple(value.shape) for key, value in state.items()} for submodel, state in before.items()}
    found = read_lora(made.path, shapes)
    assert sum(map(len, found.values())) == layers >= 4
    for theirs in (states(merged), made.merged or {}):
        for submodel, state in theirs.items():
            for key, value in state.items():
                ours = before[submodel][key]
                if key in found[submodel]:
                    ours = torch.from_numpy(merged_weight(ours.numpy(), [(found[submodel][key], 1.0)]))
                    assert not torch.allclose(ours, before[submodel][key])
                assert torch.linalg.vector_norm(ours - value) <= 2e-6 * torch.linalg.vector_norm(value), key


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"algo": "glora"}, "GLoRA"),
        ({"algo": "tlora"}, "T-LoRA"),
        ({"algo": "boft"}, "BOFT"),
        ({"algo": "diag-oft", "rescaled": True}, r"\bOFT"),
        ({"algo": "ia3"}, "IA"),
    ],
)
def test_what_lycoris_makes_besides_is_refused_by_name(
    options: dict[str, Any], kind: str, tiny: Checkpoint, tmp_path: Path
) -> None:
    path = written_by_lycoris(tiny, tmp_path, **options)
    with pytest.raises(CheckpointError, match=f"{kind}.* is not supported .*") as caught:
        lora_submodels(path)
    assert "use the result as `model`" in str(caught.value.remedy)
    (found,) = inspect(path)
    assert re.search(kind, found.details["algorithm"])
    assert f"sdflow does not merge it: {caught.value.what}." in found.notes
    assert found.workflow is None


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("bundle_emb.ink.string_to_param.*", "bundled embeddings"),  # OneTrainer's bundled embeddings
        ("lora_unet_conv_in.oft_blocks", "OFT"),
    ],
)
def test_what_others_add_is_refused_by_name(more: str, kind: str, tiny: Checkpoint, tmp_path: Path) -> None:
    path = of_comfyui(tiny, tmp_path).path
    save_file(load_file(path) | {more: torch.zeros(4)}, path)
    with pytest.raises(CheckpointError, match=kind):
        lora_submodels(path)
