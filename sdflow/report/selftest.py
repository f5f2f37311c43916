"""What `sdflow selftest` prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sdflow.report.output import print_json, print_table, put
from sdflow.selftest.lines import about, images, parts
from sdflow.selftest.result import Report, to_json


def print_selftest(report: Report, written: Iterable[Path] = (), *, as_json: bool = False) -> None:
    """The verdict, what it was measured on, where nodes run, the images; and the files that hold it."""
    if as_json:
        print_json("selftest", to_json(report))
        return
    reason = f": {_plain(report.reason)}" if report.reason else ""
    put(*f"{_plain(report.target)}: {report.verdict}{reason}".splitlines())
    print_table("", ("", "what"), [(_plain(key), _plain(value)) for key, value in about(report)])
    for table in (parts, images):
        if rows := table.rows(report):
            print_table("", table.columns, [tuple(map(_plain, row)) for row in rows])
    for name, part in report.submodels.items():
        for node, operator, provider in part.fallen:
            put(f"fallen: {_plain(name)}: {_plain(node)} ({_plain(operator)}) on {_plain(provider)}")
    for path in written:
        put(f"written: {path}")


def _plain(text: str) -> str:
    """Without what moves a terminal's cursor: a report may be anybody's."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
