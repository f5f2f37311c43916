"""LoRAs over the original layout of Stable Diffusion 3's transformer, under diffusers' names, for the reference.

diffusers 0.42.1 loads none of them. Its converter of checkpoints knows every name and the order of every row, so it is asked:
once for all names, and once for each `up` factor, whose rows are the weight's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_WEIGHT = ".weight"


def in_diffusers_names(layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], config: Config) -> Tensors:
    """layers: module, with underscores in place of dots, in either layout -> (down, up). config: of the transformer.
    Raises KeyError for a module that it has not.
    """
    every = _RecordingCheckpoint(config)
    own = {name.removesuffix(_WEIGHT).replace(".", "_"): name for name in _converted(every) if name.endswith(_WEIGHT)}
    original = {name.removesuffix(_WEIGHT).replace(".", "_"): name for name in every.names if name.endswith(_WEIGHT)}
    found: Tensors = {}
    for module, (down, up) in layers.items():
        if module in own:
            parts = {own[module]: up}
        else:
            converted = _converted(_RecordingCheckpoint(config, {original[module]: up}))
            parts = {name: part for name, part in converted.items() if part.ndim == up.ndim}
        for name, part in parts.items():
            stem = f"transformer.{name.removesuffix(_WEIGHT)}"
            if f"{stem}.lora_A.weight" in found:
                raise KeyError(f"{module}, of which {name} is there twice")
            found |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": part}
    return found


def _converted(checkpoint: dict[str, torch.Tensor]) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint)
    return converted


class _RecordingCheckpoint(dict[str, Any]):
    """A checkpoint of this config's layers with these tensors; in place of each other one it hands out a vector of zeros, and
    notes its name."""

    def __init__(self, config: Config, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        import torch

        self._nothing = torch.zeros(6)  # cut into two or three parts
        self.names: list[str] = []
        there = ["context_embedder.weight", "joint_blocks.0.x_block.attn.ln_q.weight"]
        there += [f"joint_blocks.{index}.x_block.attn.qkv.weight" for index in range(config["num_layers"])]
        there += [f"joint_blocks.{index}.x_block.attn2.qkv.weight" for index in config["dual_attention_layers"]]
        super().__init__({**dict.fromkeys(there, self._nothing), **(tensors or {})})

    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return super().pop(name, self._nothing)
