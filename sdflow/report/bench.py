"""What `sdflow bench` and `sdflow tune` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sdflow.bench.compare import Comparison
from sdflow.bench.engines import Chosen
from sdflow.bench.result import BenchResult
from sdflow.bench.table import TABLE, about, table
from sdflow.bench.tune import TuneResult
from sdflow.report.output import print_json, print_table, put

_LEFT = ("engine", "type", "image")


def print_bench(result: BenchResult, files: Sequence[Path], *, as_json: bool = False) -> None:
    """A table for each case, then what did not run, what it holds for, and what is wrong."""
    if as_json:
        content = result.to_json()
        print_json(content.pop("kind"), {**content, "files": [str(path) for path in files]})
        return
    right = [name for name in TABLE if name not in _LEFT]
    for index, case in enumerate(result.cases):
        baseline = result.baseline(index)
        title = f"{case}: milliseconds a call; ratio to {baseline.name if baseline else 'nothing: it did not run'}"
        print_table(title, TABLE, list(table(result, index)), right)
    for each in result.engines:
        if each.reason:
            put(f"{each.name}: {each.status}: {each.reason}")
    for name, value in about(result):
        put(f"{name}: {value}")
    for path in files:
        put(path)
    if result.wrong:
        put(f"WRONG images: {', '.join(result.wrong)}")


def print_engines(chosen: Sequence[Chosen], *, as_json: bool = False) -> None:
    """The table of engines, and why some do not take part here."""
    if as_json:
        engines = [{"name": each.engine.name, "title": each.engine.title, "skipped": each.skipped} for each in chosen]
        print_json("engines", {"engines": engines})
        return
    rows = [
        (each.engine.name, each.engine.title, "runs" if each.skipped is None else f"skipped: {each.skipped}")
        for each in chosen
    ]
    print_table("", ("engine", "what it is", "here"), rows)


def print_comparison(result: Comparison, *, as_json: bool = False) -> None:
    """Median milliseconds of two runs, engine by engine, and in what the runs differ."""
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
        put("FORCED: these runs were not made alike, the ratios say little:")
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
    put(f"{result.target}: {result.described}; {result.ratio:.3f} of the untuned pipeline's time")
    put(f"kept for this device and these versions in {result.file}")
