"""The reference's results: for each submodel its cases, inputs and outputs, on disk as JSON and .npz files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

CASES_FILE = "cases.json"
Kind = Literal["inputs", "float32", "float16"]
"""float16: PyTorch's results in 16 bits; bfloat16 if the artifact is."""


@dataclass(frozen=True)
class Case:
    """One run of a submodel.

    group: "trajectory", "edge", "shape", "prompt", ... step: index of the denoising step. timestep: the scheduler's.
    """

    name: str
    group: str
    step: int | None = None
    timestep: float | None = None


@dataclass
class Cases:
    """The cases of one submodel; arrays by (case index, kind, name)."""

    cases: list[Case] = field(default_factory=list)
    arrays: dict[tuple[int, Kind, str], np.ndarray] = field(default_factory=dict)

    def add(self, case: Case, inputs: Mapping[str, np.ndarray]) -> int:
        """Add a case. Returns its index, for `put`."""
        self.cases.append(case)
        self.put(len(self.cases) - 1, "inputs", inputs)
        return len(self.cases) - 1

    def put(self, index: int, kind: Kind, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays to a case."""
        self.arrays.update({(index, kind, name): array for name, array in arrays.items()})

    def get(self, index: int, kind: Kind) -> dict[str, np.ndarray]:
        """The arrays of a case."""
        return {name: array for (i, k, name), array in self.arrays.items() if (i, k) == (index, kind)}

    def __iter__(self) -> Iterator[tuple[int, Case]]:
        return iter(enumerate(self.cases))


def write_cases(folder: Path, submodels: Mapping[str, Cases], more: Mapping[str, Any]) -> None:
    """Write the cases of every submodel. more: additional JSON."""
    for submodel, cases in submodels.items():
        named: dict[str, Any] = {f"{index}/{kind}/{name}": array for (index, kind, name), array in cases.arrays.items()}
        np.savez(folder / f"{submodel}.npz", **named)
    listed = {submodel: [asdict(case) for case in cases.cases] for submodel, cases in submodels.items()}
    (folder / CASES_FILE).write_text(json.dumps({**more, "submodels": listed}, indent=1, sort_keys=True))


def read_description(folder: Path) -> dict[str, Any]:
    """Read the JSON from `write_cases`."""
    described: dict[str, Any] = json.loads((folder / CASES_FILE).read_text())
    return described


def read_cases(folder: Path, submodel: str) -> Cases:
    """Read the cases of one submodel."""
    cases = Cases([Case(**each) for each in read_description(folder)["submodels"][submodel]])
    with np.load(folder / f"{submodel}.npz") as stored:
        for key in stored.files:
            index, kind, name = key.split("/", 2)
            cases.arrays[int(index), kind, name] = stored[key]
    return cases
