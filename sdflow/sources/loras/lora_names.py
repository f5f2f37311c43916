"""Find the module of a LoRA file's tensor.

Every spelling of every module of a submodel goes into one table, in which names are looked up whole: nothing is guessed
from parts of a name, so nothing is dropped silently. The spellings are diffusers' (PEFT, and its three predecessors),
kohya's sd-scripts' and LyCORIS'; the latter two over diffusers' names and over the original UNet's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.families import FAMILIES
from sdflow.families.shared.original_unet_names import KOHYA_DENOISER, KOHYA_TEXT
from sdflow.models.base import Model, Original, Shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

Role = str
"""The role of a tensor in its module: `up`, `down`, `alpha`; otherwise the last part of its name in LyCORIS' files."""

_LYCORIS = (
    *(f"hada_{each}" for each in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{each}" for each in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    *("diff", "diff_b", "w_norm", "b_norm", "dora_scale"),
)
LAZY = ("diff", "diff_b", "w_norm", "b_norm")
"""Roles of tensors as large as the parameter they change."""

_ROLES: tuple[tuple[str, Role], ...] = (
    *((f".{each}", each) for each in _LYCORIS),
    (".lora_magnitude_vector", "magnitude"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".lora_mid.weight", "mid"),
    (".lora_A.weight", "down"),
    (".lora_B.weight", "up"),
    (".lora_down.weight", "down"),
    (".lora_up.weight", "up"),
    (".lora_linear_layer.down.weight", "down"),
    (".lora_linear_layer.up.weight", "up"),
    (".lora.down.weight", "down"),
    (".lora.up.weight", "up"),
    ("_lora.down.weight", "down"),
    ("_lora.up.weight", "up"),
    (".lora_linear_layer.alpha", "alpha"),
    (".lora.alpha", "alpha"),
    ("_lora.alpha", "alpha"),
    (".alpha", "alpha"),
)
PEFT_PREFIX = "base_model.model."
"""Prefix of every name by PEFT's save_pretrained."""
_OLDER = "text_model."
"""Prefix of a text encoder's modules before transformers 5; part of the module's name, though it also identifies the
submodel."""
_UNMERGED = {prefix: part.name for family in FAMILIES.values() for part in family.parts for prefix in part.unmerged}
UNMERGED = tuple(_UNMERGED)
"""Prefixes of tensors for parts whose LoRAs are not merged."""
_KEPT = (_OLDER, "encoder.layers.")
"""Ends of prefixes that are also part of the module's name."""
_PARTS = [part for family in FAMILIES.values() for part in family.parts if part.lora]
_PREFIXES = {
    prefix: tuple(dict.fromkeys((part.name, part.model) for part in _PARTS if prefix in part.lora))
    for prefix in sorted({prefix for part in _PARTS for prefix in part.lora}, key=len, reverse=True)
}
"""Prefix -> the submodels that it may stand for, with their models; the longest first, since some prefixes begin
others. kohya calls every denoiser a UNet, and PEFT names no submodel at all."""
_WRAPPED = "lycoris_"
"""Prefix of LyCORIS' wrapper of a single model, without a submodel."""
_OF_TEXT = re.compile(r"(text_model_)?encoder_layers_")
_PREFIXES = {_WRAPPED: _PREFIXES[KOHYA_DENOISER], **_PREFIXES}


@dataclass(frozen=True)
class LoraName:
    """A parsed tensor name: its submodel, the module in the file's spelling, the tensor's role."""

    submodel: str
    module: str
    role: Role


def parse_name(name: str) -> LoraName | None:
    """The parts of a LoRA tensor's name; None for other names."""
    for suffix, role in _ROLES:
        if name.endswith(suffix):
            stem = name[: -len(suffix)]
            for prefix, submodels in _PREFIXES.items():
                if stem.startswith(prefix):
                    kept = next((each for each in _KEPT if prefix.endswith(each)), "")
                    module = (kept + stem[len(prefix) :]).replace(".processor.", ".")
                    if prefix == _WRAPPED and _OF_TEXT.match(module):
                        submodels = _PREFIXES[KOHYA_TEXT]
                    return LoraName(_submodel(submodels, module), module, role)
    return None


def _submodel(submodels: Sequence[tuple[str, Model]], module: str) -> str:
    """The candidate whose model has a module of this name; otherwise the first one."""
    plain = module.replace(".", "_")
    return next((name for name, model in submodels if model.has_lora_module(plain)), submodels[0][0])


def part_of_unmerged(names: Iterable[str]) -> set[str]:
    """The parts that these unmerged names belong to."""
    return {part for name in names for prefix, part in _UNMERGED.items() if name.startswith(prefix)}


def peft_module(model: Model, places: Places, name: LoraName) -> str:
    """PEFT's name of the module when it wrote the file, which its configuration's patterns match.

    places: of the module. transformers before 5 had text_model in the names of a text encoder; files from then have it
    in their tensors' names, too.
    """
    if len(places) > 1:
        return name.module
    module = model.current_name(places[0].name.removesuffix(".weight"))
    return f"{_OLDER}{module}" if name.module.startswith(_OLDER) else module


Places = tuple[Original, ...]
"""The weights, as keys of the state_dict, that one module of a LoRA file changes: one, or several that share its
rows."""


def rows_of(up: NDArray[Any], place: Original) -> NDArray[Any]:
    """The rows of `up`, which covers a whole module, that belong to a weight, in its order."""
    import numpy as np

    size = len(up) // place.parts
    own = up[place.part * size : (place.part + place.taken) * size]
    return np.roll(own, len(own) // 2, axis=0) if place.swapped else own


def spellings(model: Model, shapes: Shapes, *, norms: bool = False) -> dict[str, Places]:
    """Every spelling of a model's modules whose weight a LoRA can change: spelling -> its places.

    shapes: of its whole state_dict. norms: include modules whose weight is a vector.
    """
    dims = (1, 2, 4) if norms else (2, 4)
    modules = {
        key.removesuffix(".weight"): key
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) in dims and not key.endswith("_embedding.weight")
    }
    found: dict[str, dict[int, Original]] = {}
    for module, names in model.lora_spellings(modules).items():
        for each in names:
            there = Original(each) if isinstance(each, str) else each
            place = Original(modules[module], there.part, there.parts, there.taken, swapped=there.swapped)
            for spelling in (there.name, there.name.replace(".", "_")):
                if (other := found.setdefault(spelling, {}).setdefault(there.part, place)) != place:
                    raise AssertionError(f"{spelling} stands for both {other.name} and {place.name}")
    return {
        spelling: tuple(places[part] for part in sorted(places))
        for spelling, places in found.items()
        if sum(place.taken for place in places.values()) == places[max(places)].parts
    }
