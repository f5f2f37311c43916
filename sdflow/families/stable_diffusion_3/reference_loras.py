"""Convert LoRAs in the original layout of Stable Diffusion 3's transformer to diffusers' names, for the reference.

diffusers 0.42.1 cannot load them. Its checkpoint converter knows all names and the order of all rows, so it is run once
for all names, and once for each `up` factor, which has the weight's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdflow.families.shared.reference_loras import RecordingCheckpoint, named_as_diffusers
from sdflow.models.base import Config

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


def in_diffusers_names(layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], config: Config) -> Tensors:
    """Return LoRA factors under diffusers' names. layers: module, with underscores for dots, in either layout -> (down,
    up).
    config: the transformer's. Raises KeyError for a module that does not exist.
    """

    def divided(name: str, up: torch.Tensor) -> Tensors:
        converted = _converted(_checkpoint(config, {name: up}))
        return {key: part for key, part in converted.items() if part.ndim == up.ndim}

    return named_as_diffusers(layers, _checkpoint(config), _converted, divided)


def _converted(checkpoint: dict[str, torch.Tensor]) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint)
    return converted


def _checkpoint(config: Config, tensors: Mapping[str, torch.Tensor] | None = None) -> RecordingCheckpoint:
    """Return a checkpoint in which every other tensor is a vector of zeros that can be split into two or three
    parts."""
    import torch

    there = ["context_embedder.weight", "joint_blocks.0.x_block.attn.ln_q.weight"]
    there += [f"joint_blocks.{index}.x_block.attn.qkv.weight" for index in range(config["num_layers"])]
    there += [f"joint_blocks.{index}.x_block.attn2.qkv.weight" for index in config["dual_attention_layers"]]
    return RecordingCheckpoint(there, torch.zeros(6), tensors)
