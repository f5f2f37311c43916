"""Output of `sdflow selftest`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sdflow.report.output import print_json, print_table, put
from sdflow.selftest.collect import COLUMNS, Collected, markdown, row
from sdflow.selftest.page import IMAGES, PARTS, about, image_rows, part_rows
from sdflow.selftest.result import Report, to_json


def print_collected(collected: Collected, *, as_json: bool = False) -> None:
    """The reports as a Markdown table, or as data, with those left out."""
    if as_json:
        rows = [{"file": name, **dict(zip(COLUMNS, row(report), strict=True))} for name, report in collected.reports]
        left_out = [{"file": each.file, "why": each.why} for each in collected.left_out]
        print_json("selftests", {"reports": rows, "left_out": left_out})
        return
    put(*markdown(collected).splitlines(), wrap=False)


def print_selftest(report: Report, written: Iterable[Path] = (), *, as_json: bool = False) -> None:
    """The verdict, the machine, node placement, and images; and the report's files."""
    if as_json:
        print_json("selftest", to_json(report))
        return
    reason = f": {report.reason}" if report.reason else ""
    put(*f"{report.target}: {report.verdict}{reason}".splitlines())
    print_table("", ("", "what"), [(key, value) for key, value in about(report)])
    for columns, rows in ((PARTS, part_rows(report)), (IMAGES, image_rows(report))):
        if rows:
            print_table("", columns, rows)
    for name, part in report.submodels.items():
        for node, operator, provider in part.fallen:
            put(f"fallback: {name}: {node} ({operator}) runs on {provider}")
    for path in written:
        put(f"written: {path}")
