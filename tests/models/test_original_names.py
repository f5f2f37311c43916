"""Names of the original layouts, held to diffusers' own converters and to files written by walking the modules."""

from typing import Any

import pytest
import torch
from original_layout import clip_tensors, open_clip_tensors, unet_tensors, vae_tensors

from sdflow.models.base import Original
from sdflow.models.ldm_names import ldm_unet_names, ldm_vae_names
from sdflow.models.open_clip_names import open_clip_names, open_clip_unused
from sdflow.sources.architectures import architecture_config

Tensors = dict[str, torch.Tensor]

SMALL = architecture_config("sdxl-tiny", "unet")
# The levels of the full one, which no shipped small one has: none of 1, 2 and 10 blocks of attention is another.
XL = SMALL | {
    "attention_head_dim": [2, 4, 4],
    "block_out_channels": [32, 64, 64],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "down_block_types": architecture_config("sdxl", "unet")["down_block_types"],
    "up_block_types": architecture_config("sdxl", "unet")["up_block_types"],
}
UNETS = {name: architecture_config(name, "unet") for name in ("sd15-tiny", "sd21-tiny", "sdxl-tiny")} | {"three": XL}


def filled(module: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def text_model(architecture: str, component: str = "text_encoder", **changes: Any) -> Any:
    import transformers

    config = architecture_config(architecture, component) | changes | {"vocab_size": 100}
    made = getattr(transformers, config["architectures"][0])
    return filled(made(transformers.CLIPTextConfig.from_dict(config)))


def read(tensors: Tensors, places: dict[str, Original]) -> Tensors:
    """The tensors at these places."""
    found = {}
    for key, place in places.items():
        tensor = tensors[place.name].chunk(place.parts)[place.part]
        found[key] = tensor.T if place.transposed else tensor
    return found


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", UNETS)
def test_names_of_the_unet(name: str) -> None:
    from diffusers import UNet2DConditionModel
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    unet = filled(UNet2DConditionModel.from_config(UNETS[name]))
    state, file = unet.state_dict(), unet_tensors(unet)
    converted = convert_ldm_unet_checkpoint(
        {f"model.diffusion_model.{key}": tensor for key, tensor in file.items()}, UNETS[name]
    )
    assert_equal(converted, state)
    names = ldm_unet_names(state)
    assert set(names.values()) == set(file)
    assert_equal({key: file[name] for key, name in names.items()}, state)
    modules = [key for key, module in unet.named_modules() if not list(module.children()) and module.state_dict()]
    of_modules = ldm_unet_names(modules)
    assert of_modules == {key: names[f"{key}.weight"].removesuffix(".weight") for key in modules}


@pytest.mark.parametrize("name", ["sd21-tiny", "sdxl-tiny"])
def test_names_of_the_vae(name: str) -> None:
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    config = architecture_config(name, "vae")
    vae = filled(AutoencoderKL.from_config(config))
    state, file = vae.state_dict(), vae_tensors(vae)
    converted = convert_ldm_vae_checkpoint({f"first_stage_model.{key}": tensor for key, tensor in file.items()}, config)
    assert_equal(converted, state)
    names = ldm_vae_names(state)
    assert set(names.values()) == set(file)
    assert_equal({key: file[name].reshape(state[key].shape) for key, name in names.items()}, state)


OPEN_CLIPS: dict[str, tuple[str, str, dict[str, int]]] = {
    "sd21": ("sd21-tiny", "text_encoder", {}),
    # As many layers as the published one: diffusers knows the layer that is not read by its number.
    "sd21 of 23 layers": ("sd21-tiny", "text_encoder", {"num_hidden_layers": 23}),
    "bigG": ("sdxl-tiny", "text_encoder_2", {}),
    "bigG with a square projection": ("sdxl-tiny", "text_encoder_2", {"projection_dim": 40}),
}


@pytest.mark.parametrize("name", OPEN_CLIPS)
def test_names_of_open_clip(name: str) -> None:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    architecture, component, changes = OPEN_CLIPS[name]
    prefix = "cond_stage_model.model." if component == "text_encoder" else "conditioner.embedders.1.model."
    text = text_model(architecture, component, **changes)
    state, file = text.state_dict(), open_clip_tensors(text)
    places = open_clip_names(state)
    assert_equal(read(file, places), state)

    converted = convert_open_clip_checkpoint(text, {prefix + key: tensor for key, tensor in file.items()}, prefix)
    converted = {key.removeprefix("text_model."): tensor for key, tensor in converted.items()}
    ours = {key.removeprefix("text_model."): tensor for key, tensor in read(file, places).items()}
    if name == "sd21":
        converted = {key: tensor for key, tensor in converted.items() if not key.startswith("encoder.layers.2.")}
    assert_equal(ours, converted)

    used = {place.name for place in places.values()}
    assert {name for name in file if open_clip_unused(name, state)} == set(file) - used


def test_names_of_open_clip_with_and_without_the_old_prefix() -> None:
    keys = text_model("sd21-tiny").state_dict().keys()
    bare = {key.removeprefix("text_model.") for key in keys}
    old = {f"text_model.{key}" for key in bare}
    assert open_clip_names(old) == {f"text_model.{key}": place for key, place in open_clip_names(bare).items()}
    last = "transformer.resblocks.2.ln_1.bias"
    assert open_clip_unused(last, old) and open_clip_unused(last, bare)
    assert open_clip_names(["embeddings.position_ids", "encoder.layers.0.other.weight"]) == {}


@pytest.mark.parametrize(
    ("architecture", "component", "name", "unused"),
    [
        ("sd21-tiny", "text_encoder", "transformer.resblocks.2.mlp.c_fc.weight", True),
        ("sd21-tiny", "text_encoder", "transformer.resblocks.1.mlp.c_fc.weight", False),
        ("sd21-tiny", "text_encoder", "transformer.resblocks.3.mlp.c_fc.weight", False),
        ("sd21-tiny", "text_encoder", "transformer.resblocks.2.mlp.other.weight", False),
        ("sd21-tiny", "text_encoder", "text_projection", True),
        ("sd21-tiny", "text_encoder", "attn_mask", True),
        ("sd21-tiny", "text_encoder", "other", False),
        ("sdxl-tiny", "text_encoder_2", "transformer.resblocks.3.mlp.c_fc.weight", False),
        ("sdxl-tiny", "text_encoder_2", "text_projection", False),
        ("sdxl-tiny", "text_encoder_2", "logit_scale", True),
    ],
)
def test_what_open_clip_keeps_besides(architecture: str, component: str, name: str, unused: bool) -> None:
    assert open_clip_unused(name, text_model(architecture, component).state_dict()) == unused


def test_names_of_clip() -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint

    text = text_model("sdxl-tiny")
    for prefix in ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer."):
        converted = convert_ldm_clip_checkpoint({prefix + key: value for key, value in clip_tensors(text).items()})
        assert_equal({key.removeprefix("text_model."): value for key, value in converted.items()}, text.state_dict())
