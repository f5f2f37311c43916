"""Convert LoRAs in a transformer's original layout to diffusers' names, for the reference, with diffusers' own
checkpoint converter, which knows all names and the order of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

WEIGHT = ".weight"
_DENOISER = ("lora_unet_", "lora_transformer_")
_DOWN, _UP = ".lora_down.weight", ".lora_up.weight"


def split_kohya(
    tensors: Mapping[str, torch.Tensor], text: tuple[str, ...]
) -> tuple[Tensors, Tensors, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Split a file into tensors without kohya's names, text encoder tensors under diffusers' names (which diffusers
    reads as SDXL's), and the transformer's factors: module, with underscores for dots -> (down, up).

    text: prefixes of text encoders.
    """
    import diffusers

    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((*text, *_DENOISER))}
    of_text = {name: tensor for name, tensor in tensors.items() if name.startswith(text)}
    pairs = {
        name.removeprefix(prefix).removesuffix(_DOWN): (tensor, tensors[name.replace(_DOWN, _UP)])
        for prefix in _DENOISER
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name.endswith(_DOWN)
    }
    read: Tensors = diffusers.StableDiffusionXLPipeline.lora_state_dict(of_text)[0] if of_text else {}
    return others, read, pairs


class RecordingCheckpoint(dict[str, Any]):
    """A checkpoint with these tensors that returns `nothing` for every other name and records the name. there: names
    that the converter uses to count layers."""

    def __init__(
        self, there: Iterable[str], nothing: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._nothing = nothing
        self.names: list[str] = []
        super().__init__({**dict.fromkeys(there, nothing), **(tensors or {})})

    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return super().pop(name, self._nothing)


def named_as_diffusers(
    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    checkpoint: RecordingCheckpoint,
    converted: Callable[[RecordingCheckpoint], Tensors],
    divided: Callable[[str, torch.Tensor], Tensors],
) -> Tensors:
    """Return LoRA factors under diffusers' names. layers: module, with underscores for dots, in either layout -> (down,
    up).
    checkpoint: without tensors. divided: returns the rows of `up` for each diffusers weight in an original one. Raises
    KeyError for a module that does not exist."""
    own = _by_module(converted(checkpoint))
    original = _by_module(checkpoint.names)
    found: Tensors = {}
    for module, (down, up) in layers.items():
        name = own.get(module) or own.get(f"{module}_0")  # to_out without its number
        for key, part in (divided(original[module], up) if name is None else {name: up}).items():
            add_factors(found, key, down, part, module)
    return found


def add_factors(found: Tensors, weight: str, down: torch.Tensor, up: torch.Tensor, module: str) -> None:
    """Add factors under diffusers' name of a weight. Raises KeyError if it already exists."""
    stem = f"transformer.{weight.removesuffix(WEIGHT)}"
    if f"{stem}.lora_A.weight" in found:
        raise KeyError(f"{module}, which has {weight} twice")
    found |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}


def _by_module(names: Iterable[str]) -> dict[str, str]:
    return {name.removesuffix(WEIGHT).replace(".", "_"): name for name in names if name.endswith(WEIGHT)}
