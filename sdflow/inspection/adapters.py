"""Describe LoRAs and related adapters: algorithm, rank, alpha, layers, base models, and training metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import any_family
from sdflow.families.shared.few_steps import spelled
from sdflow.inspection.contents import Contents
from sdflow.inspection.description import DRAWS_WITH, Description
from sdflow.inspection.lines import architecture_for, lora_lines
from sdflow.sources.few_steps import few_steps_of_file
from sdflow.sources.loras.adapter_kinds import module_of_tensor
from sdflow.sources.loras.lora import lora_submodels
from sdflow.sources.loras.lora_header import made_for, other_kinds
from sdflow.sources.loras.lora_names import LoraName, parse_name
from sdflow.sources.recognition import LORA
from sdflow.sources.safetensors_file import TensorEntry, read_numbers

# Factors whose first axis is the rank, by role.
_FACTORS = ("down", "hada_w1_b", "hada_w2_b", "lokr_w1_b", "lokr_w2_b")
# Metadata keys of training programs, in display order.
_SAID = {
    "training base": ("ss_base_model_version", "modelspec.architecture"),
    "base model": ("ss_sd_model_name",),
    "title": ("modelspec.title", "ss_output_name"),
    "author": ("modelspec.author",),
    "program": ("ss_network_module",),
    "resolution": ("modelspec.resolution", "ss_resolution"),
    "images": ("ss_num_train_images",),
    "steps": ("ss_steps",),
    "license": ("modelspec.license",),
}
_TRIGGERS = ("modelspec.trigger_phrase", "ss_trigger_words", "activation text")
MOST_TAGS = 12


def inspect_adapter(contents: Contents) -> Description:
    """Describe a LoRA from its header and metadata."""
    names = {name: parsed for name in contents.shapes if (parsed := _parsed(name)) is not None}
    entries = {name: TensorEntry("F32", shape, 0, 0) for name, shape in contents.shapes.items()}
    modules: dict[str, set[str]] = {}
    for parsed in names.values():
        modules.setdefault(parsed.submodel, set()).add(parsed.module)
    titles = made_for(names, entries)
    details: dict[str, Any] = {
        "algorithm": _algorithm(contents),
        "rank": _spread(_ranks(contents)),
        "alpha": _spread(_alphas(contents)),
        "layers": {name: len(modules[name]) for name in any_family.submodels_with_loras() if name in modules},
        **details_from_metadata(contents.metadata),
    }
    if (few := few_steps_of_file(contents.path, contents.metadata)) is not None:
        details[DRAWS_WITH] = f"{spelled(few.changes())} ({few.what})"
    notes, lines = [], None
    architecture = architecture_for(titles)
    if not titles:
        notes.append("It does not identify the models it is for.")
    if contents.pickled:
        notes.append("sdflow does not support pickled LoRAs: save it as .safetensors.")
    else:
        try:
            lora_submodels(contents.path)
        except CheckpointError as error:
            notes.append(f"sdflow does not merge it: {error.what}.")
        else:
            lines = lora_lines(architecture, str(contents.path))
    details = {name: value for name, value in details.items() if value not in (None, {}, [])}
    return Description(str(contents.path), LORA, titles, None, contents.precision, (), details, tuple(notes), lines)


def _parsed(name: str) -> LoraName | None:
    """Parse as a LoRA's name; for kinds that are not merged, without the module's width."""
    parsed = parse_name(name)
    if parsed is not None or (module := module_of_tensor(name)) is None:
        return parsed
    bare = parse_name(f"{module}.alpha")
    if bare is None:
        return None
    return LoraName(bare.submodel, bare.module, "alpha")


def _algorithm(contents: Contents) -> str:
    if others := other_kinds(contents.path, contents.shapes):
        return " and ".join(others)
    convolutions = any(
        len(shape) == 4 and max(shape[2:]) > 1 and (parsed := parse_name(name)) is not None and parsed.role == "down"
        for name, shape in contents.shapes.items()
    )
    return "LoRA of linear layers and convolutions (LoCon)" if convolutions else "LoRA"


def _ranks(contents: Contents) -> list[int]:
    found = []
    for name, shape in contents.shapes.items():
        parsed = parse_name(name)
        if len(shape) >= 2 and parsed is not None and parsed.role in _FACTORS:
            found.append(shape[0])
    return found


def _alphas(contents: Contents) -> list[float]:
    """The values of the alphas. Those of pickles are not read."""
    names = [name for name, shape in contents.shapes.items() if name.endswith("alpha") and shape in ((), (1,))]
    if contents.pickled or not names:
        return []
    try:
        return [*read_numbers(contents.path, names).values()]
    except CheckpointError:
        return []


def _spread(values: Iterable[float]) -> str | None:
    """One number, or the most common one with the range."""
    count = Counter(values)
    if not count:
        return None
    usual = count.most_common(1)[0][0]
    return f"{usual:g}" if len(count) == 1 else f"{usual:g} in most layers, {min(count):g} to {max(count):g}"


def details_from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Training details and trigger words from the metadata of kohya's sd-scripts (`ss_*`) and ModelSpec.

    https://github.com/kohya-ss/sd-scripts/blob/main/library/train_util.py, https://github.com/Stability-AI/ModelSpec
    """
    found: dict[str, Any] = {}
    for label, keys in _SAID.items():
        value = next((metadata[key] for key in keys if metadata.get(key) not in (None, "", "None")), None)
        if value is not None:
            found[label] = value
    triggers = next((metadata[key] for key in _TRIGGERS if metadata.get(key)), None)
    if triggers:
        found["trigger words"] = triggers
    if tags := _tags(metadata.get("ss_tag_frequency", "")):
        found["most frequent tags"] = tags
    return found


def trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """Words that activate the LoRA in a prompt: its trigger words, otherwise the tags of most captions."""
    said = details_from_metadata(metadata)
    if "trigger words" in said:
        return [word.strip() for word in said["trigger words"].split(",") if word.strip()]
    tags = said.get("most frequent tags", {})
    return [tag for tag, often in tags.items() if 2 * often >= max(tags.values())]


def _tags(text: str) -> dict[str, int]:
    """Tag -> number of captions with it: `{"folder": {"tag": count}}`, summed over folders."""
    try:
        folders = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    count: Counter[str] = Counter()
    for tags in folders.values() if isinstance(folders, dict) else ():
        for tag, often in tags.items() if isinstance(tags, dict) else ():
            if isinstance(often, int):
                count[tag.strip()] += often
    return dict(count.most_common(MOST_TAGS))
