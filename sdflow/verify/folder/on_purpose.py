"""What belongs at a key of a JSON file of a pipeline folder: the checkpoint's value, or what a row of `ON_PURPOSE` says."""

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
    """Stands for a key that is not there."""


ABSENT = Absent()


@dataclass(frozen=True)
class Expected:
    """What belongs in the folder of a pipeline with these submodels, from this checkpoint."""

    source: Source
    submodels: Sequence[str]

    @property
    def family(self) -> Family:
        return FAMILIES[self.source.family]

    @property
    def companions(self) -> tuple[str, ...]:
        """What lies beside the graphs: what the checkpoint has of it."""
        return tuple(self.source.companions)

    def keys(self, file: str, source: Mapping[str, Any]) -> list[str]:
        """The keys that may belong into a file at its top: those of the checkpoint's, and those that rows name."""
        named = [key for row in self.rows(file) if row.key for key in self._names(row.key, file) if "*" not in key]
        return list(dict.fromkeys([*source, *named]))

    def allowed(self, file: str, key: str, source: Any) -> tuple[Any, ...] | None:
        """The values that may stand at a key, ABSENT among them where it may be missing; None: any may.

        source: what the checkpoint has there, or ABSENT.
        """
        row = self.row(file, key)
        return (source,) if row is None else row.value(self, file, key, source)

    def row(self, file: str, key: str) -> Row | None:
        """The first row of the table that fits."""
        return next(
            (row for row in self.rows(file) if any(fnmatchcase(key, name) for name in self._names(row.key, file))), None
        )

    def rows(self, file: str) -> list[Row]:
        """The rows of the table that are about a file."""
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
        """What a key of the table stands for."""
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
            if any(part in family.submodels for part in companion.parts)  # what is beside an adapter is not spoken of
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
        """Its own options; of the checkpoint's entries those that it knows, and others as it pleases."""
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
        """Whether the filter of images is there."""
        checker = self.family.checker
        return (ABSENT,) if checker is None else (checker in self.submodels,)


@dataclass(frozen=True)
class Row:
    """An intended difference.

    file: of the folder. key: of its JSON, a pattern of fnmatch; empty for the file as a whole. Words in <> stand for names of
    the pipeline: <submodel> for each that it has, <companion> for what lies beside them, <scheduler> for the one with the
    steps, <absent> for components that its class may have and it has not, <option> for the entries that its family reads, <set>
    for the entries that its family sets. value: as of `Expected.allowed`, from what is expected, file, key and the checkpoint's
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
        "The checkpoint's class runs modules of PyTorch; by this one diffusers and optimum know a folder of ONNX graphs.",
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
        "The graph stands in place of the module. A VAE becomes two graphs, with a name each.",
    ),
    Row(
        "model_index.json",
        "<companion>",
        lambda expected, file, key, source: (expected.companion_class(key),),
        "Old checkpoints name classes that transformers 5 no longer has, and a scheduler's own config names its class, which "
        "may be another where a LoRA or the workflow asks for it.",
    ),
    Row(
        "model_index.json",
        "<absent>",
        lambda *_: ([None, None],),
        "diffusers asks its class for every component: what is not there is said to be none.",
    ),
    Row(
        "model_index.json",
        "requires_safety_checker",
        lambda expected, *_: expected.filter_required(),
        "A workflow may leave out the filter of images, and diffusers warns where one is required and not there.",
    ),
    Row(
        "model_index.json",
        "<option>",
        lambda expected, file, key, source: (expected.family.options[key] if source is ABSENT else source,),
        "Entries that change what is computed are written down also where the checkpoint leaves them to diffusers.",
    ),
    Row(
        "model_index.json",
        "*",
        _left_out,
        "Components of PyTorch whose graphs have other names, those that no pipeline here has (an image encoder), the "
        "watermark, and where the checkpoint once lay.",
    ),
    *(
        Row(
            "<submodel>/config.json",
            key,
            _left_out,
            "It says who wrote the file, or where it lay; not what the model is.",
        )
        for key in ("_diffusers_version", "_name_or_path", "transformers_version")
    ),
    Row(
        "<submodel>/config.json",
        "<set>",
        lambda expected, file, key, source: (expected.set_by_family(file)[key],),
        "It chooses the inputs and outputs of the graph: the layers of a text encoder that are read, what ControlNets give, the "
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
        "Only files that the libraries read are copied: of a stranger's folder nothing else goes on.",
    ),
)
"""Everything that an assembled folder has on purpose otherwise than its checkpoint. The first row that fits a file and a key
counts."""
