"""ControlNets beside a checkpoint: from everywhere they may come from, tensor by tensor; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file

from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, UsageError
from sdflow.manifest import Origin
from sdflow.models.controlnet import ControlNet
from sdflow.models.residuals import residual_ports
from sdflow.passes.registry import catalog
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint, reopen_checkpoint
from sdflow.sources.architectures import architecture_config
from sdflow.store import Cache

MODEL, XL = "synthetic:sd15-tiny", "synthetic:sdxl-tiny"
NET = "controlnet_edges"
# lllyasviel's layout, a few of its names by hand (cldm/cldm.py): diffusers' name -> there, without `control_model.`.
ORIGINAL = {
    "controlnet_cond_embedding.conv_in.weight": "input_hint_block.0.weight",
    "controlnet_cond_embedding.blocks.0.bias": "input_hint_block.2.bias",
    "controlnet_cond_embedding.blocks.5.weight": "input_hint_block.12.weight",
    "controlnet_cond_embedding.conv_out.weight": "input_hint_block.14.weight",
    "controlnet_down_blocks.0.weight": "zero_convs.0.0.weight",
    "controlnet_down_blocks.11.bias": "zero_convs.11.0.bias",
    "controlnet_mid_block.weight": "middle_block_out.0.weight",
    "conv_in.weight": "input_blocks.0.0.weight",
    "time_embedding.linear_2.bias": "time_embed.2.bias",
    "down_blocks.0.resnets.1.conv1.weight": "input_blocks.2.0.in_layers.2.weight",
    "down_blocks.1.attentions.0.proj_in.weight": "input_blocks.4.1.proj_in.weight",
    "down_blocks.2.downsamplers.0.conv.weight": "input_blocks.9.0.op.weight",
    "mid_block.resnets.1.conv2.bias": "middle_block.2.out_layers.3.bias",
}


def opened(reference: str = MODEL, **nets: str) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False, allow_pickle=True, nets=nets)


def state(checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    tensors: Mapping[str, torch.Tensor] = load_module(NET, checkpoint.submodels[NET].load).state_dict()
    return tensors


@pytest.fixture(scope="module")
def net() -> Any:
    """What is looked for, as diffusers' module."""
    found = opened(edges=f"{MODEL}?seed=7")
    return load_module(NET, found.submodels[NET].load)


def in_diffusers_names(folder: Path, net: Any) -> str:
    save_file(net.state_dict(), folder / "net.safetensors")
    return str(folder / "net.safetensors")


def original(net: Any, prefix: str) -> dict[str, torch.Tensor]:
    tensors = net.state_dict()
    names = ControlNet().original_names(tensors)
    return {f"{prefix}{names[key].name}": value for key, value in tensors.items()}


def in_original_names(folder: Path, net: Any) -> str:
    """As control_sd15_canny.pth was converted: the whole pipeline beside it."""
    others = {"model.diffusion_model.out.2.bias": torch.zeros(4), "first_stage_model.quant_conv.bias": torch.zeros(8)}
    save_file({**original(net, "control_model."), **others}, folder / "control.safetensors")
    return str(folder / "control.safetensors")


def without_prefix(folder: Path, net: Any) -> str:
    save_file(original(net, ""), folder / "bare.safetensors")
    return str(folder / "bare.safetensors")


def pickled(folder: Path, net: Any) -> str:
    torch.save({"state_dict": original(net, "control_model.")}, folder / "control.pth")
    return str(folder / "control.pth")


def as_folder(folder: Path, net: Any) -> str:
    net.save_pretrained(folder / "net")
    return str(folder / "net")


def in_a_pipeline(folder: Path, net: Any) -> str:
    net.save_pretrained(folder / "pipeline" / "controlnet")
    return str(folder / "pipeline")


@pytest.mark.parametrize(
    "write", [in_diffusers_names, in_original_names, without_prefix, pickled, as_folder, in_a_pipeline]
)
def test_a_net_has_the_tensors_that_were_written_wherever_it_comes_from(tmp_path: Path, net: Any, write: Any) -> None:
    found, wanted = state(opened(edges=write(tmp_path, net))), net.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_names_of_the_original_layout_are_lllyasviels(net: Any) -> None:
    names = ControlNet().original_names(net.state_dict())
    assert set(names) == set(net.state_dict())
    assert {key: names[key].name for key in ORIGINAL} == ORIGINAL


@pytest.mark.parametrize("architecture", ["sd15", "sd21", "sdxl", "sd15-tiny", "sd21-tiny", "sdxl-tiny"])
def test_the_config_beside_a_unet_is_that_of_diffusers(architecture: str) -> None:
    from accelerate import init_empty_weights

    unet = architecture_config(architecture, "unet")
    with init_empty_weights():
        wanted = ControlNetModel.from_unet(UNet2DConditionModel.from_config(unet), load_weights_from_unet=False)
        ours = ControlNet().empty(ControlNet().config_for(unet))
    assert {name: tuple(each.shape) for name, each in ours.state_dict().items()} == {
        name: tuple(each.shape) for name, each in wanted.state_dict().items()
    }
    lists = ("conditioning_embedding_out_channels",)  # a tuple there
    kept = {key: value for key, value in wanted.config.items() if not key.startswith("_") and key not in lists}
    assert {key: ours.config[key] for key in kept} == kept


@pytest.mark.parametrize(("architecture", "count"), [("sd15", 13), ("sd21", 13), ("sdxl", 10)])
def test_there_is_a_residual_for_each_skip_connection_and_the_middle(architecture: str, count: int) -> None:
    assert len(residual_ports(architecture_config(architecture, "unet"))) == count


def test_nets_change_the_denoiser_and_nothing_else_of_the_checkpoint() -> None:
    plain, controlled = opened(), opened(edges=MODEL)
    assert set(controlled.submodels) - set(plain.submodels) == {NET}
    changed = {
        name for name in plain.submodels if plain.submodels[name].identity != controlled.submodels[name].identity
    }
    assert changed == {"unet"}
    assert controlled.submodels["unet"].load["config"].keys() - plain.submodels["unet"].load["config"].keys() == {
        "control_residuals"
    }
    assert {**plain.provenance, "controlnets": controlled.provenance["controlnets"]} == controlled.provenance


def test_nets_of_equal_content_have_one_key_for_each_step() -> None:
    """Two nets of one architecture share their graph, however they are called."""
    found = opened(edges=MODEL, depth=MODEL)
    assert found.submodels[NET].identity == found.submodels["controlnet_depth"].identity
    family = found.family
    assert family.part(NET).kind == family.part("controlnet_depth").kind == "controlnet"


def test_what_a_manifest_says_of_nets_opens_them_again(tmp_path: Path, net: Any) -> None:
    reference = in_diffusers_names(tmp_path, net)
    found = opened(edges=reference)
    origin = Origin("x", "cpu", model=MODEL, checkpoint=found.provenance, controlnets={"edges": reference})
    again = reopen_checkpoint(origin, "sdflow.json", digests=PlainDigests())
    assert again.submodels[NET].identity == found.submodels[NET].identity
    save_file({name: value + 1 for name, value in net.state_dict().items()}, tmp_path / "net.safetensors")
    with pytest.raises(UsageError, match="differs from the one"):
        reopen_checkpoint(origin, "sdflow.json", digests=PlainDigests())


def a_lora(folder: Path, net: Any) -> str:
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(4, 4)}, folder / "lora.safetensors")
    return str(folder / "lora.safetensors")


def pooling(folder: Path, net: Any) -> str:
    other = ControlNetModel.from_config({**net.config, "global_pool_conditions": True})
    other.load_state_dict(net.state_dict())
    other.save_pretrained(folder / "shuffle")
    return str(folder / "shuffle")


def a_unet(folder: Path, net: Any) -> str:
    UNet2DConditionModel.from_config(architecture_config("sd15-tiny", "unet")).save_pretrained(folder / "unet")
    return str(folder / "unet")


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (a_lora, "this is not a supported ControlNet"),
        (pooling, "pools its outputs over the image"),
        (a_unet, "not of ControlNetModel"),
        (lambda folder, net: XL, "takes"),
        (lambda folder, net: str(folder / "nowhere"), "no such file or folder"),
        (lambda folder, net: str(folder), "holds neither"),
    ],
)
def test_what_is_no_net_for_this_checkpoint_is_refused(tmp_path: Path, net: Any, write: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        opened(edges=write(tmp_path, net))


def test_a_net_for_another_generation_in_one_file_is_refused_before_it_is_loaded(tmp_path: Path, net: Any) -> None:
    with pytest.raises(CheckpointError, match=r"conv_in.weight is|attn2.to_k.weight is"):
        opened(XL, edges=in_diffusers_names(tmp_path, net))


@pytest.mark.parametrize("nets", [1, 2])
@pytest.mark.parametrize(("model", "kind"), [(MODEL, "StableDiffusion"), (XL, "StableDiffusionXL")])
def test_the_nets_of_a_pipeline_that_diffusers_saved_are_as_if_they_were_named(
    model: str, kind: str, nets: int, tmp_path: Path
) -> None:
    """Its folder as a workflow's `model`: the keys are those of the workflow that names them."""
    seeds = {"controlnet": 1, "controlnet_1": 2}
    names = [*seeds][:nets]
    made = load_pipeline(opened(model, **{name: f"{model}?seed={seeds[name]}" for name in names}))
    modules = [made.controlnet] if nets == 1 and not hasattr(made.controlnet, "nets") else list(made.controlnet.nets)
    parts = {name: each for name, each in made.components.items() if name != "controlnet"}
    extra = {"requires_safety_checker": False} if kind == "StableDiffusion" else {"add_watermarker": False}
    cls = getattr(diffusers, f"{kind}ControlNetPipeline")
    saved = tmp_path / "saved"
    cls(**parts, controlnet=modules[0] if nets == 1 else modules, **extra).save_pretrained(saved)

    base = "tiny" if kind == "StableDiffusion" else "stable_diffusion_xl"
    text = f"extends: base/{base}.yaml\nmodel: {saved}\ntarget: cpu\n"
    named = {name: str(saved / name) for name in names}

    def planned(also: str = "") -> Any:
        (tmp_path / "w.yaml").write_text(text + also)
        workflow = load_workflow(tmp_path / "w.yaml", catalog=catalog())
        (plan,) = make_plan(workflow, Cache(tmp_path / "cache")).pipelines
        return plan

    found = planned()
    assert found.pipeline.controlnets == named
    assert {f"controlnet_{name}" for name in names} <= {chain.submodel for chain in found.chains}
    for name, module in zip(names, modules, strict=True):
        loaded = load_module(f"controlnet_{name}", found.checkpoint.submodels[f"controlnet_{name}"].load).state_dict()
        assert all(torch.equal(loaded[key], each) for key, each in module.state_dict().items())
    said = planned(f"controlnets: {json.dumps(named)}\n")
    assert {name: each.identity for name, each in said.checkpoint.submodels.items()} == {
        name: each.identity for name, each in found.checkpoint.submodels.items()
    }
    assert isinstance(load_pipeline(found.checkpoint), cls)
    assert planned("controlnets: {controlnet: null}\n").pipeline.controlnets == {
        name: each for name, each in named.items() if name != "controlnet"
    }
    plain = opened(str(saved))
    assert any("has ControlNets, which are left out" in note for note in plain.notes)
    assert not any("left out" in note for note in found.checkpoint.notes)
