"""Interpret a LoRA file's header and PEFT's configuration: which weights of which submodels it changes, and how.

Kinds of adapters that are not merged are rejected here, from only the header, so that every command rejects them before
building anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, FAMILIES, any_family, family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.models.base import Config
from sdflow.sources.architectures import architecture_config
from sdflow.sources.checkpoint import listing
from sdflow.sources.loras.adapter_kinds import (
    MERGE_ELSEWHERE,
    MERGE_WITH_PEFT,
    READ,
    kind_of_config,
    kind_of_tensor,
    module_of_tensor,
)
from sdflow.sources.loras.lora_names import PEFT_PREFIX, UNMERGED, LoraName, parse_name, part_of_unmerged
from sdflow.sources.loras.peft_metadata import (
    METADATA_KEY,
    PeftConfig,
    model_class,
    peft_config_of,
    peft_fields_of,
    read_peft_configs,
)
from sdflow.sources.safetensors_file import TensorEntry, read_header, read_metadata, require_floats, require_numbers
from sdflow.sources.weight_files import ADAPTER_CONFIG

PEFT_FILE = "adapter_model"
"""PEFT's file name for tensors in save_pretrained, without the suffix."""
_PEFT_NAMES = "base_model."
"""Prefix of all its names: those of a module have PEFT_PREFIX, shared ones only this."""


@dataclass(frozen=True)
class LoraHeader:
    """The interpreted header of a LoRA file.

    names: the file's parsed tensors. entries: all of them. configs: PEFT's, by submodel. has_config: whether the
    configuration is a separate file, which is then part of the LoRA.
    """

    names: Mapping[str, LoraName]
    entries: Mapping[str, TensorEntry]
    configs: Mapping[str, PeftConfig]
    has_config: bool


def read_lora_header(path: Path) -> LoraHeader:
    """Raises CheckpointError for a file that is not a LoRA, of an unsupported kind, or with quantized tensors."""
    entries = read_header(path)
    of_peft = METADATA_KEY not in read_metadata(path) and is_of_peft(path, entries)
    fields = peft_fields_of(path) if of_peft else None
    names = _parsed(entries, fields or {})
    submodels = sorted({parsed.submodel for parsed in names.values()})
    # The configuration takes precedence: tensor names reveal few of PEFT's kinds, and none of its options.
    config = None if fields is None else peft_config_of(path, fields)
    configs = read_peft_configs(path, any_family.submodels_with_loras(), submodels)
    _require_lora(path, entries, names, of_peft)
    if of_peft and config is None:
        raise CheckpointError(
            f"PEFT wrote it, but {ADAPTER_CONFIG}, which has its alpha, is missing next to it",
            where=str(path),
            remedy="Put that file next to it, and name the folder or the file on disk.",
        )
    if config is not None and len(submodels) > 1:
        raise CheckpointError(
            f"its {ADAPTER_CONFIG} is for one model, but its tensors are for {' and '.join(submodels)}",
            where=str(path),
            remedy="Use an unchanged file from PEFT.",
        )
    alphas = {name: entries[name] for name, parsed in names.items() if parsed.role == "alpha"}
    require_numbers(path, alphas)
    require_floats(path, {name: entry for name, entry in entries.items() if name not in alphas})
    return LoraHeader(names, entries, configs if config is None else {submodels[0]: config}, config is not None)


def is_of_peft(path: Path, names: Iterable[str]) -> bool:
    """Whether PEFT's save_pretrained wrote a file, with the configuration next to it."""
    return any(name.startswith(_PEFT_NAMES) for name in names) or (
        path.stem == PEFT_FILE and path.with_name(ADAPTER_CONFIG).is_file()
    )


def is_adapter(path: Path, names: Collection[str]) -> bool:
    """Whether PEFT wrote a file, or most of its tensors are a LoRA's or a related adapter's."""
    if is_of_peft(path, names):
        return True
    known = sum(parse_name(name) is not None or module_of_tensor(name) is not None for name in names)
    return 0 < known >= len(names) / 2  # half of an (IA)3's tensors are called `weight`


def other_kinds(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The kinds of adapter in a file other than plain LoRA: by PEFT's configuration, otherwise by the tensors' names,
    most frequent first. Raises CheckpointError for an invalid configuration."""
    fields = peft_fields_of(path) if is_of_peft(path, shapes) else None
    said = None if fields is None else kind_of_config(fields.get("peft_type"))
    if said is not None:
        return (said.title,)
    found = Counter(kind for name, shape in shapes.items() if (kind := kind_of_tensor(name, shape)) is not None)
    return tuple(kind for kind, _ in found.most_common())


def _require_lora(path: Path, entries: Mapping[str, TensorEntry], names: Mapping[str, LoraName], of_peft: bool) -> None:
    unmerged = [name for name in entries if name.startswith(UNMERGED)]
    if unmerged:
        parts = ", ".join(sorted(part_of_unmerged(unmerged)))
        raise CheckpointError(
            f"also changes a part whose LoRAs are not merged ({parts}): {listing(unmerged)}",
            where=str(path),
            remedy="Use a copy without these tensors.",
        )
    for name, entry in entries.items():
        if (kind := kind_of_tensor(name, entry.shape)) is not None and kind not in READ:
            raise CheckpointError(
                f"{kind} is not supported (tensor {name})",
                where=str(path),
                remedy=MERGE_WITH_PEFT if of_peft else MERGE_ELSEWHERE,
            )
    strange = [name for name in entries if name not in names]
    if strange or not names:
        raise CheckpointError(
            f"tensors that do not belong to a LoRA: {listing(strange)}" if strange else "holds no tensors",
            where=str(path),
            remedy="Supported are LoRA, LoHa, LoKr and DoRA in diffusers' (peft), kohya's and LyCORIS' key styles.",
        )


def _parsed(names: Iterable[str], fields: Mapping[str, Any]) -> dict[str, LoraName]:
    """The names that belong to a LoRA. fields: PEFT's configuration, which identifies the text encoder if names do
    not."""
    submodel = _of_class(model_class(fields))
    parsed = {name: parts for name in names if (parts := parse_name(name)) is not None}
    return {
        name: replace(parts, submodel=submodel) if submodel and name.startswith(PEFT_PREFIX) else parts
        for name, parts in parsed.items()
    }


def _of_class(name: str | None) -> str | None:
    """The submodel of a model class, since PEFT's tensor names do not distinguish text encoders. If families differ,
    one with a single part of the class decides."""
    found = [
        [part.name for part in family.parts if part.lora and part.model.class_name == name]
        for family in FAMILIES.values()
    ]
    return next((parts[0] for parts in sorted(found, key=len) if parts), None)


def misfit(
    family: Family, configs: Mapping[str, Config], names: Mapping[str, LoraName], header: Mapping[str, TensorEntry]
) -> str | None:
    """The first tensor that shows that a LoRA is for another model, and why; None if there is none.

    configs: of the model, by part. names: the file's parsed tensors.
    """
    for name, parsed in names.items():
        if parsed.submodel not in family.with_loras:
            return f"{name}: {family.title} has no {parsed.submodel}"
    for name, parsed, width in input_widths(names, header):
        if parsed.submodel not in configs:
            continue
        model, module = family.part(parsed.submodel).model, parsed.module.replace(".", "_")
        if why := model.lora_misfit(configs[parsed.submodel], module, width):
            return f"{name}: {why}"
    return None


def input_widths(
    names: Mapping[str, LoraName], header: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, LoraName, int]]:
    """The tensors that define a module's input width, with the width; for a LoKr, the product of two widths."""
    left = {}
    for name, parsed in names.items():
        shape, module = header[name].shape, (parsed.submodel, parsed.module)
        if len(shape) < 2:
            continue
        if parsed.role in ("down", "hada_w1_b", "diff"):
            yield name, parsed, shape[1]
        elif parsed.role in ("lokr_w1", "lokr_w1_b"):
            left[module] = shape[1]
    for name, parsed in names.items():
        shape, module = header[name].shape, (parsed.submodel, parsed.module)
        if parsed.role in ("lokr_w2", "lokr_w2_b") and len(shape) > 1 and module in left:
            yield name, parsed, left[module] * shape[1]


def made_for(names: Mapping[str, LoraName], header: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Titles of the supported models that the LoRA may be for; empty if it matches all of them."""
    fitting: dict[str, bool] = {}
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        configs = {name: architecture_config(architecture, family.part(name).component) for name in family.with_loras}
        title = family.title_of(configs)
        fitting[title] = fitting.get(title, False) or misfit(family, configs, names, header) is None
    return () if all(fitting.values()) else tuple(title for title, fits in fitting.items() if fits)
