"""Recognize kinds of adapters other than plain LoRA, in a file or a PEFT configuration, with one name for all commands.

LoRA, LoHa, LoKr, their DoRA, and weight differences are merged (`layers.py`). All other kinds are rejected by name:
merged as LoRAs they would give wrong or partial results. Every field of PEFT's LoraConfig is honoured, rejected by
name, or irrelevant for merging. The tables are in `peft.json`; tests compare them with the installed PEFT, and fail for
new fields until they are classified here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Decision = Literal["honoured", "refused", "without effect"]

MERGE_WITH_PEFT = (
    "Merge it with PEFT (merge_and_unload), save the model (save_pretrained) and name it under `components`."
)
MERGE_ELSEWHERE = "Merge it into the checkpoint with the program that made it and use the result as `model`."
USE_A_LORA = "Use a plain LoRA instead."


@dataclass(frozen=True)
class PeftType:
    """A kind of adapter in PEFT. merges: whether its merge_and_unload can merge it into a model. read: whether sdflow
    merges it."""

    title: str
    merges: bool = True
    read: bool = False


_TABLES = json.loads((Path(__file__).parent / "peft.json").read_text(encoding="utf-8"))
PEFT_TYPES: Mapping[str, PeftType] = {name: PeftType(**row) for name, row in _TABLES["types"].items()}
"""`peft_type` -> the kind. A test compares the table with the installed PEFT."""

_IN_NAMES = {
    each: rf"(\.|^base_model\.){each.lower()}_"
    for each in PEFT_TYPES
    if each not in ("ADALORA", "FROD", "IA3", "LOHA", "LOKR", "OFT", "TRAINABLE_TOKENS", "XLORA")
}
"""PEFT's tensor names for most of its kinds."""

_Dims = tuple[int, ...]

_READ: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.dora_scale$|\.lora_magnitude_vector(\.weight)?$"), "DoRA"),
    (re.compile(r"\.hada_(w[12]_[ab]|t[12])$"), "LoHa"),
    (re.compile(r"\.lokr_(w[12](_[ab])?|t2)$"), "LoKr"),
    (re.compile(r"\.lora_mid\.weight$"), "LoCon with a Tucker decomposition"),
    (re.compile(r"\.[wb]_norm$"), "trained norms"),
    (re.compile(r"\.diff(_b)?$"), "full difference"),
)
"""Kinds that are merged, by patterns unique to their tensors' names."""

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.lora_magnitude_vector"), "DoRA of another form"),
    (re.compile(r"\.lora_[AB]\.bias$"), "a LoRA with biases of its own (lora_bias)"),
    (re.compile(r"\.lora_embedding_[AB]"), "embedding LoRA"),
    (re.compile(r"\.lora_(E|ranknum|[AB])$"), "AdaLoRA"),
    (re.compile(r"\.lora_diag$"), "KaSA"),
    (re.compile(r"\.base_layer\.bias$"), "a LoRA with biases of the model (bias)"),
    (re.compile(r"\.hada_"), "LoHa of another form"),
    (re.compile(r"\.lokr_"), "LoKr of another form"),
    (re.compile(r"\.(a1|a2|b1|b2|bm)\.weight$"), "GLoRA"),
    (re.compile(r"\.([qp]_layer\.weight|lambda_layer)$"), "T-LoRA"),
    (re.compile(r"\.oft_|\.oft\.|\.rescale$"), "OFT"),
    (re.compile(r"\.on_input$|\.ia3_l"), "(IA)3"),
    (re.compile(r"(\.|^base_model\.)frod_"), "FRoD"),
    (re.compile(r"\.trainable_tokens_"), "training of single tokens (trainable tokens)"),
    (re.compile(r"\.modules_to_save\."), "a LoRA with whole modules (modules_to_save)"),
    (re.compile(r"internal_xlora_classifier"), "X-LoRA"),
    (re.compile(r"^(string_to_param|bundle_emb)\."), "a LoRA with bundled embeddings"),
    *((re.compile(pattern), PEFT_TYPES[each].title) for each, pattern in _IN_NAMES.items()),
)  # fmt: skip
"""Kinds that are not merged, by the same."""
_KINDS = (*_READ, *_REFUSED)

_OFT_BLOCKS = ".oft_blocks"
_BUTTERFLY = 4
"""Dimensions of BOFT's blocks in LyCORIS, which names them like OFT's: its butterfly has several stages."""


def kind_of_tensor(name: str, shape: _Dims = ()) -> str | None:
    """The kind of adapter that a tensor of this name belongs to; None for plain LoRA and for unknown names. `READ`
    holds the kinds that are merged."""
    if name.endswith(_OFT_BLOCKS) and len(shape) == _BUTTERFLY:
        return "BOFT"
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None)


def module_of_tensor(name: str) -> str | None:
    """The module's part of such a tensor's name; None if `kind_of_tensor` knows none."""
    found = next((match for pattern, _ in _KINDS if (match := pattern.search(name))), None)
    return None if found is None else name[: found.start()]


READ = frozenset(kind for _, kind in _READ)
"""The kinds that are merged, other than plain LoRA."""


def kind_of_config(peft_type: Any) -> PeftType | None:
    """The kind in PEFT's configuration; None for a LoRA. An unknown kind has its `peft_type` as its title."""
    if peft_type is None or peft_type == "LORA":
        return None
    return PEFT_TYPES.get(str(peft_type), PeftType(str(peft_type)[:100], merges=False))


def title_of(peft_type: str) -> str:
    """The title of a known kind in PEFT's configuration."""
    return "LoRA" if peft_type == "LORA" else PEFT_TYPES[peft_type].title


@dataclass(frozen=True)
class Field:
    """A field of LoraConfig. plain: for a rejected one, the values besides null that keep the result scale * up @ down.
    merges: for a rejected one, whether PEFT can merge such an adapter."""

    decision: Decision
    why: str
    plain: tuple[Any, ...] = ()
    merges: bool = True


def _fields(peft_type: str) -> dict[str, Field]:
    return {name: Field(**{**row, "plain": tuple(row.get("plain", ()))}) for name, row in _TABLES[peft_type].items()}


LORA_CONFIG: Mapping[str, Field] = _fields("LORA")
"""The fields of LoraConfig."""
_SHARED = (
    *("r", "rank_pattern", "alpha_pattern", "modules_to_save", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "inference_mode", "task_type", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision"),
)
LOHA_CONFIG: Mapping[str, Field] = {**{name: LORA_CONFIG[name] for name in _SHARED}, **_fields("LOHA")}
LOKR_CONFIG: Mapping[str, Field] = {**LOHA_CONFIG, **_fields("LOKR")}
CONFIGS: Mapping[str, Mapping[str, Field]] = {"LORA": LORA_CONFIG, "LOHA": LOHA_CONFIG, "LOKR": LOKR_CONFIG}
"""`peft_type` -> its fields, for the kinds that are merged."""
