"""The pipelines of one workflow: models x LoRAs x targets, each with its own name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePosixPath

from sdflow.config.chain import unknown_keys
from sdflow.config.fields import MATRIX
from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, as_map, expect_kind, text_of, to_data
from sdflow.config.workflow import Mark
from sdflow.sources.reference import FILE_SUFFIXES, PICKLE_SUFFIXES, split_architecture
from sdflow.targets import TARGETS

MAX_CELLS = 256
_MAX_LABEL = 48


@dataclass(frozen=True)
class Choice:
    """One value of an axis (None if the workflow has none), and its label in pipeline names, if any."""

    label: str = ""
    value: Node | None = None


@dataclass(frozen=True)
class Cell:
    """One combination: the model (None if the workflow has none), the list of LoRAs and the target."""

    name: str
    model: Node | None
    loras: Node | None
    target: str


def cells(workflow: YamlMap, stem: str, targets: Sequence[str], problems: Problems) -> list[Cell]:
    """Every combination, named. targets: replaces the workflow's own unless empty."""
    written = workflow.entries.get("matrix", YamlMap({}, {}, workflow.mark))
    axes = as_map(written, f"a map of {', '.join(MATRIX)}", "`matrix`", problems)
    if axes is None:
        return []
    unknown_keys(axes, MATRIX, "axis", problems)
    name = _name(workflow.entries.get("name"), stem, problems)
    models = _axis(axes, "model", workflow.entries.get("model"), problems)
    loras = _axis(axes, "loras", workflow.entries.get("loras"), problems)
    chosen = _targets(axes.entries.get("target", workflow.entries.get("target")), workflow.mark, targets, problems)
    count = len(models) * len(loras) * len(chosen)
    if count > MAX_CELLS:
        problems.add(axes.mark, f"the matrix has {count} cells", f"at most {MAX_CELLS}")
        return []
    taken: set[str] = set()
    found = []
    for model, lora, (target, label) in product(models, loras, chosen):
        full = "-".join(part for part in (name, model.label, lora.label, label) if part)
        found.append(Cell(_unique(full, taken), model.value, lora.value, target))
    return found


def _unique(name: str, taken: set[str]) -> str:
    """The name, with a number appended if another pipeline has it; case is ignored, as on some file systems."""
    candidate, number = name, 1
    while candidate.casefold() in taken:
        number += 1
        candidate = f"{name}-{number}"
    taken.add(candidate.casefold())
    return candidate


def slug(text: str) -> str:
    """Turn text into a part of a folder name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:_MAX_LABEL].strip("-.")


def _name(node: Node | None, stem: str, problems: Problems) -> str:
    if node is None:
        return slug(stem) or "pipeline"
    if (name := text_of(node)) is not None and slug(name) == name:
        return name
    kind = f"up to {_MAX_LABEL} letters, digits and . _ + -, with none of . and - at its ends"
    expect_kind(node, kind, "`name`", problems)
    return "pipeline"


def _axis(axes: YamlMap, axis: str, single: Node | None, problems: Problems) -> list[Choice]:
    """The choices of an axis; without it, the workflow's single value."""
    node = axes.entries.get(axis)
    if node is None:
        return [Choice("", single)]
    what = f"`matrix.{axis}`"
    if isinstance(node, YamlMap):
        labelled = [(slug(key) or "unnamed", value) for key, value in node.entries.items()]
    elif isinstance(node, YamlList):
        label = model_label if axis == "model" else loras_label
        labelled = [(label(to_data(item)), item) for item in node.items]
    else:
        expect_kind(node, "a list, or a map from a short name to each value", what, problems)
        return []
    if not labelled:
        problems.add(node.mark, f"{what} is empty, so there is no pipeline", "leave the axis out")
    first: dict[str, Mark] = {}
    for _, value in labelled:
        content = repr(to_data(value))
        if content in first:
            problems.add(value.mark, f"{what} has this value twice", f"first at {first[content]}")
        first.setdefault(content, value.mark)
    return [Choice(name, value) for name, value in labelled]


def model_label(reference: object) -> str:
    """A short name of a model: `hf:owner/name@x` -> name, `models/a.safetensors` -> a, `synthetic:sd15` -> sd15."""
    text = reference if isinstance(reference, str) else ""
    scheme, separator, rest = text.partition(":")
    if separator and len(scheme) > 1:
        rest = rest.partition("@")[0].replace("?", "-").replace("=", "") if scheme != "hf" else rest.partition("@")[0]
        return slug(split_architecture(rest)[0].rpartition("/")[2]) or "model"
    path = PurePosixPath(text.replace("\\", "/"))
    return slug(path.stem if path.suffix.lower() in (*FILE_SUFFIXES, *PICKLE_SUFFIXES) else path.name) or "model"


def loras_label(loras: object) -> str:
    """A short name of a list of LoRAs: their files, with scales other than 1; "plain" for none."""
    names = []
    for lora in loras if isinstance(loras, list) else ():
        fields = lora if isinstance(lora, dict) else {}
        scale = fields.get("scale", 1.0)
        label = model_label(fields.get("weight_name") or fields.get("file"))
        names.append(label if scale == 1 else f"{label}-{scale}")
    return slug("+".join(names)) or "plain"


def _targets(node: Node | None, where: Mark, chosen: Sequence[str], problems: Problems) -> list[tuple[str, str]]:
    """The targets, each with its label in pipeline names: empty for the only target of a workflow."""
    written: list[str] = []
    for item in node.items if isinstance(node, YamlList) else (node,) if node is not None else ():
        if not (isinstance(item, YamlScalar) and isinstance(item.value, str)):
            expect_kind(item, "a target or a list of targets", "`target`", problems)
        elif item.value not in TARGETS:
            problems.add(item.mark, f"unknown target {item.value!r}", nearest(item.value, TARGETS))
        elif item.value in written:
            problems.add(item.mark, f"the target {item.value!r} is listed twice")
        else:
            written.append(item.value)
    for name in chosen:
        if name not in TARGETS:
            problems.add(Mark(f"--target {name}", 0, 0), f"unknown target {name!r}", nearest(name, TARGETS))
    if node is None and not chosen:
        problems.add(where, "no `target`", f"target: one of {', '.join(TARGETS)}; or --target on the command line")
    elif isinstance(node, YamlList) and not node.items:
        problems.add(node.mark, "`target` is empty", f"one or several of {', '.join(TARGETS)}")
    built = [name for name in dict.fromkeys(chosen) if name in TARGETS] if chosen else written
    return [(name, "" if written == [name] else name) for name in built]
