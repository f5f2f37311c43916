"""Compare two runs, which must have the same machine, versions and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.bench.result import read_result
from sdflow.errors import UsageError

COMPARED = ("machine", "versions", "settings")
"""Parts that must be equal. The pipelines may differ, as the subject of the comparison."""


@dataclass(frozen=True)
class Difference:
    """A field, such as `machine.processor`, with each run's value."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.before} / {self.after}"


@dataclass(frozen=True)
class Compared:
    """An engine in a case of both runs: median milliseconds per call, and whether the image was right."""

    engine: str
    case: str
    before_ms: float
    after_ms: float
    before_verdict: str
    after_verdict: str

    @property
    def ratio(self) -> float:
        return self.after_ms / self.before_ms


@dataclass(frozen=True)
class Comparison:
    """Two results of `sdflow bench`, engine by engine.

    differences: of machine, versions and settings, non-empty only if forced. pipeline: differences of the
    pipelines.
    """

    rows: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    pipeline: tuple[Difference, ...]


def compare(before: Path, after: Path, *, force: bool = False) -> Comparison:
    """Compare two results. Raises UsageError naming every differing field, unless forced, and if no engine and case is
    in both."""
    first, second = read_result(before), read_result(after)
    differences = tuple(
        each for part in COMPARED for each in _differences(part, first.get(part, {}), second.get(part, {}))
    )
    if differences and not force:
        listed = "\n".join(f"  {each}" for each in differences)
        raise UsageError(
            f"these runs cannot be compared, they differ in\n{listed}",
            where=f"{before}, {after}",
            remedy="Measure both on one machine, with one set of versions and settings; or --force.",
        )
    try:
        one, other = _medians(first), _medians(second)
    except (KeyError, TypeError, IndexError) as error:
        raise UsageError(
            f"a result is damaged: {error!r}", where=f"{before}, {after}", remedy="Run `sdflow bench` again."
        ) from error
    rows = tuple(Compared(*key, one[key][0], other[key][0], one[key][1], other[key][1]) for key in one if key in other)
    if not rows:
        raise UsageError(
            "no engine was measured in the same case in both",
            where=f"{before}, {after}",
            remedy="Measure both with the same --engine, --batch, --size and --steps.",
        )
    return Comparison(rows, differences, tuple(_differences("pipeline", first["pipeline"], second["pipeline"])))


def _medians(result: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, str]]:
    found = {}
    for engine in result["engines"]:
        for case, measured in zip(result["cases"], engine["cases"], strict=False):
            if measured is not None:
                name = f"{case['batch']} x {case['width']}x{case['height']}, {case['steps']} steps"
                found[engine["name"], name] = (float(measured["image"]["median_ms"]), str(measured["verdict"]))
    return found


def _differences(where: str, before: Any, after: Any) -> list[Difference]:
    """The differing leaves."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = dict.fromkeys([*before, *after])
        return [each for key in keys for each in _differences(f"{where}.{key}", before.get(key), after.get(key))]
    return [] if before == after else [Difference(where, before, after)]
