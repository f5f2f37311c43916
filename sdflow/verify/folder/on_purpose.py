"""The allowed values of JSON keys in a pipeline folder: the checkpoint's, or those of a row in `ON_PURPOSE`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE
from sdflow.disk.input_file import read_json
from sdflow.families import FAMILIES
from sdflow.families.shared.base import ONNX_COMPONENT, Family
from sdflow.families.shared.schedulers import SCHEDULERS
from sdflow.runtime.files.folder import SCHEDULER
from sdflow.verify.folder.source import Source


class Absent:
    """Marks a missing key."""


ABSENT = Absent()


@dataclass(frozen=True)
class Expected:
    """The expected content of a pipeline folder with these submodels, from this checkpoint."""

    source: Source
    submodels: Sequence[str]

    @property
    def family(self) -> Family:
        return FAMILIES[self.source.family]

    @property
    def companions(self) -> tuple[str, ...]:
        """The checkpoint's companions."""
        return tuple(self.source.companions)

    def keys(self, file: str, source: Mapping[str, Any]) -> list[str]:
        """The top-level keys that a file may have: the checkpoint's, and those that rows name."""
        named = [key for row in self.rows(file) if row.key for key in self._names(row.key, file) if "*" not in key]
        return list(dict.fromkeys([*source, *named]))

    def allowed(self, file: str, key: str, source: Any) -> tuple[Any, ...] | None:
        """The allowed values of a key, ABSENT among them if it may be missing; None: any.

        source: the checkpoint's value, or ABSENT.
        """
        row = self.row(file, key)
        return (source,) if row is None else row.value(self, file, key, source)

    def row(self, file: str, key: str) -> Row | None:
        """The first matching row."""
        return next(
            (row for row in self.rows(file) if any(fnmatchcase(key, name) for name in self._names(row.key, file))), None
        )

    def rows(self, file: str) -> list[Row]:
        """The rows that apply to a file."""
        return [row for row in ON_PURPOSE if self._of_file(row, file)]

    def _of_file(self, row: Row, file: str) -> bool:
        folder, _, name = row.file.rpartition("/")
        if row.file == "<scheduler>":
            own = f"{SCHEDULER}/{self.family.companions[SCHEDULER].file}"
            return file == own and self.source.scheduler is not None
        if folder == "<submodel>":
            return file in {f"{submodel}/{name}" for submodel in self.submodels}
        if folder == "<companion>":
            return any(fnmatchcase(file, f"{companion}/{name}") for companion in self.companions)
        return file == row.file

    def _names(self, pattern: str, file: str) -> Sequence[str]:
        """Expand a key of the table."""
        if pattern == "<set>":
            return list(self.set_by_family(file))
        return {
            "<submodel>": self.submodels,
            "<companion>": self.companions,
            "<absent>": self._absent,
            "<option>": list(self.family.options),
        }.get(pattern, [pattern])

    @cached_property
    def _absent(self) -> list[str]:
        family = self.family
        absent = [*family.lacks, *(part.name for part in family.parts if part.optional)]
        absent += [
            name
            for name, companion in family.companions.items()
            if any(part in family.submodels for part in companion.parts)  # companions of adapters are not listed
        ]
        return [name for name in absent if name not in self.submodels and name not in self.companions]

    def set_by_family(self, file: str) -> Mapping[str, Any]:
        """The entries of a submodel's config.json that its family sets."""
        submodel = file.removesuffix(f"/{CONFIG_FILE}")
        part, adapted = self.family.part(submodel), self.source.adapted.get(submodel, {})
        options = {name: self.source.index.get(name, self.family.options[name]) for name in part.options}
        return {**part.config, **options, **(part.controlled if self.family.nets(self.submodels) else {}), **adapted}

    def pipeline_class(self) -> str:
        """The class for ONNX graphs."""
        configs = {name: self.source.configs[name] for name in self.submodels if name in self.source.configs}
        return self.family.assembled_as[self.family.task(configs)]

    def companion_class(self, name: str) -> list[str]:
        """The library and the class that load a companion; a scheduler's is named in its own config."""
        companion = self.family.companions[name]
        if companion.class_name:
            return [companion.library, companion.class_name]
        if self.source.scheduler is not None:
            return [companion.library, SCHEDULERS[self.source.scheduler][0]]
        config = read_json(Path(self.source.companions[SCHEDULER]) / companion.file, finite=False)
        return [companion.library, str(config["_class_name"])]

    def of_said_scheduler(self, key: str, source: Any) -> tuple[Any, ...]:
        """The scheduler's own options; entries of the checkpoint that it knows; any value for others."""
        import diffusers

        assert self.source.scheduler is not None
        name, options = SCHEDULERS[self.source.scheduler]
        if key == "_class_name":
            return (name,)
        if key in options:
            return (options[key],)
        known = inspect.signature(getattr(diffusers, name).__init__).parameters
        return (source,) if key in known else (source, ABSENT)

    def filter_required(self) -> tuple[Any, ...]:
        """Whether the safety checker is included."""
        checker = self.family.checker
        return (ABSENT,) if checker is None else (checker in self.submodels,)


@dataclass(frozen=True)
class Row:
    """An intended difference.

    file: in the folder. key: of its JSON, an fnmatch pattern; empty for the whole file. Words in <> stand for names of
    the pipeline: <submodel> for each of its submodels, <companion> for each companion, <scheduler> for the one with the
    steps, <absent> for optional components that are missing, <option> for entries that its family reads, <set> for
    entries that its family sets. value: `Expected.allowed`'s result, from Expected, file, key and the checkpoint's
    value. why: the reason.
    """

    file: str
    key: str
    value: Callable[[Expected, str, str, Any], tuple[Any, ...] | None]
    why: str


def _left_out(*_: Any) -> tuple[Any, ...]:
    return (ABSENT,)


ON_PURPOSE: tuple[Row, ...] = (
    Row(
        "model_index.json",
        "_class_name",
        lambda expected, *_: (expected.pipeline_class(),),
        "The checkpoint's class runs PyTorch modules; diffusers and optimum recognize a folder of ONNX graphs by this one.",
    ),
    Row(
        "model_index.json",
        "_diffusers_version",
        lambda *_: None,
        "It says who wrote the file, not what is in the folder.",
    ),
    Row(
        "model_index.json",
        "<submodel>",
        lambda *_: (ONNX_COMPONENT,),
        "The graph replaces the module. A VAE becomes two graphs with separate names.",
    ),
    Row(
        "model_index.json",
        "<companion>",
        lambda expected, file, key, source: (expected.companion_class(key),),
        "Old checkpoints name classes that transformers 5 removed, and a scheduler's own config names its class, which "
        "may differ if a LoRA or the workflow asks for it.",
    ),
    Row(
        "model_index.json",
        "<absent>",
        lambda *_: ([None, None],),
        "diffusers expects every component of its class: missing ones are listed as null.",
    ),
    Row(
        "model_index.json",
        "requires_safety_checker",
        lambda expected, *_: expected.filter_required(),
        "A workflow may leave out the safety checker, and diffusers warns if a required one is missing.",
    ),
    Row(
        "model_index.json",
        "<option>",
        lambda expected, file, key, source: (expected.family.options[key] if source is ABSENT else source,),
        "Entries that change the result are written even if the checkpoint leaves them to diffusers.",
    ),
    Row(
        "model_index.json",
        "*",
        _left_out,
        "PyTorch components whose graphs have other names, components that no pipeline here has (an image encoder), the "
        "watermark, and the checkpoint's former location.",
    ),
    *(
        Row(
            "<submodel>/config.json",
            key,
            _left_out,
            "It says who wrote the file, or where it was stored, not what the model is.",
        )
        for key in ("_diffusers_version", "_name_or_path", "transformers_version")
    ),
    Row(
        "<submodel>/config.json",
        "<set>",
        lambda expected, file, key, source: (expected.set_by_family(file)[key],),
        "It selects the inputs and outputs of the graph: the text encoder layers that are read, the outputs of ControlNets, the "
        "tokens of IP-Adapters.",
    ),
    Row(
        "<scheduler>",
        "*",
        lambda expected, file, key, source: expected.of_said_scheduler(key, source),
        "A LoRA or a checkpoint for few steps, or the workflow, asks for another scheduler, with the same noise schedule.",
    ),
    Row(
        "<companion>/*",
        "",
        _left_out,
        "Only files that the libraries read are copied from an untrusted folder.",
    ),
)
"""All intended differences between an assembled folder and its checkpoint. The first row that matches a file and a key
applies."""
