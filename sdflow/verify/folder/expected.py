"""What belongs at a key of a JSON file of a pipeline folder: the checkpoint's value, or what a row of `ON_PURPOSE` says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
from sdflow.verify.folder.on_purpose import ON_PURPOSE, Row, Value
from sdflow.verify.folder.source import Source


class Absent:
    """Stands for a key that is not there."""

    def __repr__(self) -> str:
        return "nothing"


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

    @property
    def scheduler_file(self) -> str:
        return f"{SCHEDULER}/{self.family.companions[SCHEDULER].file}"

    def keys(self, file: str, source: Mapping[str, Any]) -> list[str]:
        """The keys that may belong into a file at its top: those of the checkpoint's, and those that rows name."""
        rows = [row for row in self.rows(file) if row.key]
        named = [key for row in rows for key in self._names(row.key, file) if "*" not in key]
        return list(dict.fromkeys([*source, *named]))

    def allowed(self, file: str, key: str, source: Any) -> tuple[Any, ...] | None:
        """The values that may stand at a key, ABSENT among them where it may be missing; None: any may.

        source: what the checkpoint has there, or ABSENT.
        """
        row = self.row(file, key)
        return (source,) if row is None else self._value(row.value, file, key, source)

    def row(self, file: str, key: str) -> Row | None:
        """The first row of the table that fits."""
        return next((row for row in self.rows(file) if self._fits(row.key, file, key)), None)

    def rows(self, file: str) -> list[Row]:
        """The rows of the table that are about a file."""
        return [row for row in ON_PURPOSE if self._of_file(row, file)]

    def _of_file(self, row: Row, file: str) -> bool:
        folder, _, name = row.file.rpartition("/")
        if row.file == "<scheduler>":
            return file == self.scheduler_file and self.source.scheduler is not None
        if folder == "<submodel>":
            return file in {f"{submodel}/{name}" for submodel in self.submodels}
        if folder == "<companion>":
            return any(fnmatchcase(file, f"{companion}/{name}") for companion in self.companions)
        return file == row.file

    def _fits(self, pattern: str, file: str, key: str) -> bool:
        return any(fnmatchcase(key, name) if "*" in name else key == name for name in self._names(pattern, file))

    def _names(self, pattern: str, file: str) -> Sequence[str]:
        """What a key of the table stands for."""
        if pattern == "<set>":
            return list(self._set(file))
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

    def _set(self, file: str) -> Mapping[str, Any]:
        submodel = file.removesuffix(f"/{CONFIG_FILE}")
        part, adapted = self.family.part(submodel), self.source.adapted.get(submodel, {})
        options = {name: self.source.index.get(name, self.family.options[name]) for name in part.options}
        return {**part.config, **options, **(part.controlled if self.family.nets(self.submodels) else {}), **adapted}

    def _value(self, value: Value, file: str, key: str, source: Any) -> tuple[Any, ...] | None:
        family = self.family
        if value == "anything":
            return None
        if value == "left out":
            return (ABSENT,)
        if value == "an ONNX model":
            return (ONNX_COMPONENT,)
        if value == "nothing":
            return ([None, None],)
        if value == "the class for ONNX graphs":
            configs = {name: self.source.configs[name] for name in self.submodels if name in self.source.configs}
            return (family.assembled_as[family.task(configs)],)
        if value == "the class that loads it":
            return ([family.companions[key].library, family.companions[key].class_name or self._scheduler_class],)
        if value == "whether the filter is there":
            return (ABSENT,) if family.checker is None else (family.checker in self.submodels,)
        if value == "the checkpoint's, or diffusers' default":
            return (family.options[key] if source is ABSENT else source,)
        if value == "what the family sets":
            return (self._set(file)[key],)
        return self._of_said_scheduler(key, source)

    @cached_property
    def _scheduler_class(self) -> str:
        if self.source.scheduler is not None:
            return SCHEDULERS[self.source.scheduler][0]
        file = Path(self.source.companions[SCHEDULER]) / self.family.companions[SCHEDULER].file
        return str(read_json(file, finite=False)["_class_name"])

    def _of_said_scheduler(self, key: str, source: Any) -> tuple[Any, ...]:
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
