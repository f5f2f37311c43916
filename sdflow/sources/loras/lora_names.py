"""Which module a tensor of a LoRA file belongs to.

Every spelling of every module of a submodel is written into one table, and a name is looked up in it whole: nothing
is guessed from parts of a name, so nothing is dropped in silence. The spellings are those of diffusers (peft, and the
three that came before it) and of kohya's sd-scripts, the latter over diffusers' names and over the original UNet's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sdflow.families import FAMILIES
from sdflow.models.base import Model, Shapes

Role = Literal["up", "down", "alpha"]

_ROLES: tuple[tuple[str, Role], ...] = (
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
"""How PEFT's save_pretrained begins every name."""
_OLDER = "text_model."
"""What transformers before 5 had in front of a text encoder's modules: a part of the module's name, though it tells the
submodel too."""
_KEPT = (_OLDER, "encoder.layers.")
"""Ends of prefixes that belong to the module's name as well."""
_PREFIXES = sorted(
    # In the order of families, as several share prefixes: a set's order would differ from process to process.
    dict.fromkeys((prefix, part.name) for family in FAMILIES.values() for part in family.parts for prefix in part.lora),
    key=lambda entry: -len(entry[0]),
)
"""How a name begins -> the submodel; the longest first, as some are the beginning of others."""


@dataclass(frozen=True)
class LoraName:
    """A parsed tensor name: the submodel it says it is for, the module in the file's spelling, the tensor's role."""

    submodel: str
    module: str
    role: Role


def parse_name(name: str) -> LoraName | None:
    """The parts of a LoRA tensor's name; None when it is not one."""
    for suffix, role in _ROLES:
        if name.endswith(suffix):
            stem = name[: -len(suffix)]
            for prefix, submodel in _PREFIXES:
                if stem.startswith(prefix):
                    kept = next((each for each in _KEPT if prefix.endswith(each)), "")
                    module = kept + stem[len(prefix) :]
                    return LoraName(submodel, module.replace(".processor.", "."), role)
    return None


def peft_module(model: Model, key: str, name: LoraName) -> str:
    """What peft called the module when it wrote the file; the patterns in its configuration are for this name.

    key: of the weight, in the state_dict. transformers before 5 had a text_model in the names of a text encoder: a
    file from there has it in its tensors' names too.
    """
    module = model.current_name(key.removesuffix(".weight"))
    return f"{_OLDER}{module}" if name.module.startswith(_OLDER) else module


def spellings(model: Model, shapes: Shapes) -> dict[str, str]:
    """Every spelling of the modules of a model with a weight that a LoRA can change: spelling -> state_dict key.

    shapes: of its whole state_dict.
    """
    modules = {
        key.removesuffix(".weight"): key
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) in (2, 4) and not key.endswith("_embedding.weight")
    }
    table: dict[str, str] = {}
    for module, names in model.lora_spellings(modules).items():
        _enter(table, names, modules[module])
    return table


def _enter(table: dict[str, str], names: Iterable[str], key: str) -> None:
    for name in names:
        for spelling in (name, name.replace(".", "_")):
            if table.setdefault(spelling, key) != key:
                raise AssertionError(f"{spelling} stands for both {table[spelling]} and {key}")
