"""Convert LoRAs in the original layout of FLUX.1's transformer to diffusers' names, for the reference.

diffusers' own reader of such files (`_convert_kohya_flux_lora_to_diffusers`) only supports blocks of width 3,072, and
ignores the last layer's alphas. Its checkpoint converter knows all names and the order of all rows, so it is run on row
numbers instead of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from sdflow.families.shared.reference_loras import WEIGHT, RecordingCheckpoint, named_as_diffusers
from sdflow.models.base import Config

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_PUBLISHED = 3072
"""Width by which diffusers' converter divides `linear1`."""
_LINEAR1 = ".linear1.weight"
_LINEAR1_ROWS = 7 * _PUBLISHED


def in_diffusers_names(layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], config: Config) -> Tensors:
    """Return LoRA factors under diffusers' names. layers: module, with underscores for dots, in either layout -> (down,
    up).
    config: the transformer's. Raises KeyError for a module that does not exist.
    """
    return named_as_diffusers(layers, _checkpoint(config), _converted, partial(_divided, config))


def _divided(config: Config, name: str, up: torch.Tensor) -> Tensors:
    """Return the rows of `up` for each diffusers weight that this original weight contains."""
    import torch

    count = _LINEAR1_ROWS if name.endswith(_LINEAR1) else len(up)
    if count % len(up):
        raise KeyError(f"{name}, with {len(up)} rows")
    step = count // len(up)  # row numbers per row of a narrower model
    converted = _converted(_checkpoint(config, {name: torch.arange(count)}))
    held = {key: rows for key, rows in converted.items() if key.endswith(WEIGHT) and rows.min() >= 0}
    return {key: up[rows[::step] // step].contiguous() for key, rows in held.items()}


def _converted(checkpoint: dict[str, torch.Tensor]) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    return converted


def _checkpoint(config: Config, tensors: Mapping[str, torch.Tensor] | None = None) -> RecordingCheckpoint:
    """Return a checkpoint in which every other tensor is a vector of -1."""
    import torch

    there = [f"double_blocks.{index}.img_mod.lin.weight" for index in range(config["num_layers"])]
    there += [f"single_blocks.{index}.linear1.weight" for index in range(config["num_single_layers"])]
    there += ["guidance_in.in_layer.weight"] if config.get("guidance_embeds") else []
    return RecordingCheckpoint(there, torch.full((_LINEAR1_ROWS,), -1), tensors)
