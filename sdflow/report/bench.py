"""Output of `sdflow bench` and `sdflow tune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sdflow.bench.compare import Comparison
from sdflow.bench.engines import Chosen
from sdflow.bench.result import BenchResult
from sdflow.bench.table import HEADS, SHORT, TEXTS, about, by_median, short_table, table
from sdflow.bench.tune import TuneResult
from sdflow.printable import columns_of
from sdflow.report.output import GAP, print_json, print_table, put, put_verdict

BARS = " "
"""Heading of the bars' column."""
LEAST, MOST = 10, 40
_EIGHTHS = "▏▎▍▌▋▊▉"


def print_bench(
    result: BenchResult, files: Sequence[Path], *, as_json: bool = False, quiet: bool = False, verbose: bool = False
) -> None:
    """A table per case, then skipped engines, the figures' scope, and wrong images. quiet: only the tables. verbose:
    all columns, and the whole scope."""
    if as_json:
        content = result.to_json()
        print_json(content.pop("kind"), {**content, "files": [str(path) for path in files]})
        return
    for index, case in enumerate(result.cases):
        if verbose:
            baseline = result.baseline(index)
            title = (
                f"{case}, fastest first; {f'ratio to {baseline.name}' if baseline else 'no ratios: no baseline ran'}"
            )
            print_table(title, HEADS, table(result, index), [name for name in HEADS if name not in TEXTS])
        else:
            _print_case(result, index)
    if not quiet:
        for each in result.engines:
            if each.reason:
                put(f"{each.name}: {each.status}: {each.reason}")
        for name, value in about(result):
            if verbose or name not in ("versions", "settings"):
                put(f"{name}: {value}")
    for path in files:
        put(path)
    if result.wrong:
        put_verdict("", f"WRONG images: {', '.join(result.wrong)}")


def _print_case(result: BenchResult, index: int) -> None:
    """The engines of a case, fastest first, within 80 columns; on a terminal with a bar each."""
    columns, rows = [*SHORT], list(short_table(result, index))
    room = room_beside(columns, rows)
    if 0 < room < LEAST:  # a bar is worth more than the rate, which follows from the median
        rate = columns.index("images/s")
        columns, rows = _without(columns, rate), [_without(row, rate) for row in rows]
        room = room_beside(columns, rows)
    medians = [measured.image.median_ms for _, measured in by_median(result, index)]
    if (drawn := bars(medians, room)) is not None:
        columns.append(BARS)
        rows = [[*row, bar] for row, bar in zip(rows, drawn, strict=True)]
    right = [name for name in columns if name not in (*TEXTS, BARS)]
    print_table(f"{result.cases[index]}, fastest first", columns, rows, right, below=("memory MB", "images/s", "type"))


def room_beside(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The terminal columns that a table leaves free; 0 for a file, and if blocks cannot be printed."""
    room, encoding = columns_of(sys.stdout), (sys.stdout.encoding or "").lower()
    if room is None or not encoding.startswith("utf"):
        return 0
    taken = sum(max(map(len, each)) + GAP for each in zip(columns, *rows, strict=True))
    return room - taken - GAP


def bars(values: Sequence[float], room: int) -> list[str] | None:
    """A bar per value, the longest one filling the room; None if there is too little."""
    if not values or room < LEAST or max(values) <= 0:
        return None
    eighths = [max(1, round(value / max(values) * min(room, MOST) * 8)) for value in values]
    return ["█" * (each // 8) + (_EIGHTHS[each % 8 - 1] if each % 8 else "") for each in eighths]


def _without(cells: Sequence[str], index: int) -> list[str]:
    return [*cells[:index], *cells[index + 1 :]]


def print_engines(chosen: Sequence[Chosen], *, as_json: bool = False) -> None:
    """The table of engines, and why some do not run here."""
    if as_json:
        engines = [{"name": each.engine.name, "title": each.engine.title, "skipped": each.skipped} for each in chosen]
        print_json("engines", {"engines": engines})
        return
    rows = [
        (each.engine.name, each.engine.title, "runs" if each.skipped is None else f"skipped: {each.skipped}")
        for each in chosen
    ]
    print_table("", ("engine", "description", "here"), rows)


def print_comparison(result: Comparison, *, as_json: bool = False) -> None:
    """Median milliseconds of two runs, by engine, and the runs' differences."""
    if as_json:
        rows = [{**asdict(row), "ratio": row.ratio} for row in result.rows]
        print_json("bench-comparison", {**asdict(result), "rows": rows})
        return
    rows_ = [
        (
            row.engine,
            row.case,
            f"{row.before_ms:.2f}",
            f"{row.after_ms:.2f}",
            f"{row.ratio:.3f}",
            " / ".join(dict.fromkeys((row.before_verdict, row.after_verdict))),
        )
        for row in result.rows
    ]
    columns = ("engine", "case", "before ms", "after ms", "ratio", "image")
    print_table("", columns, rows_, ("before ms", "after ms", "ratio"))
    if result.differences:
        put("FORCED: the runs differ in machine or settings, so the ratios mean little:")
    for difference in (*result.differences, *result.pipeline):
        put(f"  {difference}")


def print_tune(result: TuneResult, *, as_json: bool = False) -> None:
    """Every trial, and the choice."""
    if as_json:
        print_json("tune", result.to_json())
        return
    rows = [
        (
            trial.option,
            trial.value,
            "" if trial.ratio is None else f"{trial.ratio:.3f}",
            "" if trial.distance is None else f"{trial.distance:.1e}",
            trial.verdict + (f": {trial.reason}" if trial.reason else ""),
        )
        for trial in result.trials
    ]
    print_table("", ("option", "value", "time", "distance", ""), rows, ("time", "distance"))
    put(f"{result.target}: {result.described}; takes {result.ratio:.3f} of the untuned pipeline's time")
    put(f"stored in {result.file}, for this device and these versions")
