"""What a configuration says of a network's parameters is what its class makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from sdflow.families import ARCHITECTURES, FAMILIES, family_of_architecture
from sdflow.families.shared.part import Part
from sdflow.sources.architectures import architecture_config, architecture_index
from sdflow.sources.load import parameter_shapes


def made(part: Part, family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(part.name, {"kind": "hollow", "family": family, "config": config})


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "tiny" in name] + ["sd15", "sd21"])
def test_the_parameters_of_every_architecture_are_those_of_its_classes(architecture: str) -> None:
    family, index = family_of_architecture(architecture), architecture_index(architecture)
    for component, parts in family.components.items():
        if index.get(component, [None])[0] is None or component == family.checker:  # whose are not said
            continue
        config = architecture_config(architecture, component)
        assert parts[0].model.parameters(config) == made(parts[0], family.name, config), component


@pytest.mark.slow
def test_the_parameters_of_xl_at_full_size_are_those_of_its_classes() -> None:
    test_the_parameters_of_every_architecture_are_those_of_its_classes("sdxl")


@pytest.mark.parametrize("architecture", ["sd35-large", "sd3-medium"])
@pytest.mark.parametrize("dual", [[], [0], [2]])
def test_of_another_transformer_they_are_its_classes(architecture: str, dual: list[int]) -> None:
    """That of every size of Stable Diffusion 3, three layers deep."""
    family = family_of_architecture(architecture)
    part = family.part(family.denoiser)
    config = architecture_config(architecture, part.component) | {"num_layers": 3, "dual_attention_layers": dual}
    assert part.model.parameters(config) == made(part, family.name, config)


@pytest.mark.parametrize(
    "entries", [{"feed_forward_proj": "relu", "is_gated_act": False}, {"d_kv": 8}, {"num_layers": 1}]
)
def test_of_another_t5_they_are_its_classes(entries: dict[str, Any]) -> None:
    part = FAMILIES["stable_diffusion_3"].part("text_encoder_3")
    config = architecture_config("sd35-tiny", part.component) | entries
    assert part.model.parameters(config) == made(part, "stable_diffusion_3", config)


@pytest.mark.parametrize(
    "entries",
    [
        {"transformer_layers_per_block": [1, 2, 1, 1]},
        {"layers_per_block": 1},
        {"use_linear_projection": True},
        {"attention_head_dim": [2, 4, 8, 8]},
        {"block_out_channels": [16, 32, 48, 64], "norm_num_groups": 8},
        {"time_cond_proj_dim": 12},
        {"cross_attention_dim": 20},
        {"dual_cross_attention": True},
        {"class_embed_type": "timestep"},
        {"resnet_time_scale_shift": "scale_shift"},
        {"mid_block_type": "UNetMidBlock2D"},
    ],
)
def test_of_another_unet_they_are_right_or_not_said(entries: dict[str, Any]) -> None:
    family = family_of_architecture("sd15-tiny")
    part, config = family.part("unet"), {**architecture_config("sd15-tiny", "unet"), **entries}
    said = part.model.parameters(config)
    assert said is None or said == made(part, family.name, config)
    covered = not {"dual_cross_attention", "class_embed_type", "resnet_time_scale_shift", "mid_block_type"} & set(
        entries
    )
    assert (said is not None) == covered


@pytest.mark.parametrize(
    "entries",
    [
        {"layers_per_block": 2},
        {"use_quant_conv": False, "use_post_quant_conv": False},
        {"mid_block_add_attention": False},
    ],
)
def test_of_another_vae_they_are_right_or_not_said(entries: dict[str, Any]) -> None:
    family = family_of_architecture("sd15-tiny")
    part, config = family.part("vae_decoder"), {**architecture_config("sd15-tiny", "vae"), **entries}
    said = part.model.parameters(config)
    assert said is None or said == made(part, family.name, config)
    assert (said is None) == ("mid_block_add_attention" in entries)
