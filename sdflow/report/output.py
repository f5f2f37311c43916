"""The two forms of output: text, including tables, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sdflow.errors import SdflowError, WorkflowError
from sdflow.printable import columns_of, fitted, in_one_line, takes_colour

FORMAT_VERSION = 1
LEAST_WRAPPED = 24
"""Minimum width of a wrapped cell."""
GAP = 2
"""Columns between a table's cells, and before the first."""


_printed: list[str] = []


def print_json(kind: str, content: Mapping[str, Any]) -> None:
    """Print a JSON document with its format version and kind."""
    _printed.append(kind)
    print(json.dumps({"format_version": FORMAT_VERSION, "kind": kind, **content}, indent=2))


def print_error(error: SdflowError) -> None:
    """Print a failed command's JSON document, unless it has already printed one, such as a failed verification's."""
    if _printed:
        return
    content: dict[str, Any] = {"where": error.where, "what": error.what, "remedy": error.remedy}
    if isinstance(error, WorkflowError):
        first = error.problems[0]
        place = f"{first.file}:{first.line}:{first.column}" if first.line else first.file
        content = {"where": place, "what": first.message, "remedy": first.remedy}
        content["problems"] = [asdict(problem) for problem in error.problems]
    print_json("error", {**content, "exit_status": error.exit_code})


VERDICTS = ("", "image", "verdict", "state")
"""Columns of verdicts, which are coloured."""
COLOURS = {
    **dict.fromkeys(("passed", "right", "within", "running", "built"), "32"),
    **dict.fromkeys(("FAILED", "failed", "WRONG", "broken", "died"), "1;31"),
    **dict.fromkeys(("missed", "skipped", "unavailable", "unsteady", "approximation"), "33"),
}
"""First word of a verdict -> ANSI code of its colour: green, red or yellow."""


def coloured(text: str) -> str:
    """Colour a verdict if standard output is a terminal with colours."""
    words = text.split(maxsplit=1)
    colour = COLOURS.get(words[0].rstrip(":,")) if words else None
    return f"\x1b[{colour}m{text}\x1b[0m" if colour and takes_colour(sys.stdout) else text


def put_verdict(text: str, verdict: str) -> None:
    """Print a line like `put`, with a coloured verdict at its end."""
    lines = [in_one_line(f"{text}{verdict}")]
    if (columns := columns_of(sys.stdout)) is not None:
        lines = fitted(lines[0], columns)
    if lines[-1].endswith(verdict):
        lines[-1] = lines[-1].removesuffix(verdict) + coloured(verdict)
    for line in lines:
        print(line)


def put(*lines: object, wrap: bool = True) -> None:
    """Print lines, with terminal control characters and inner line ends escaped, since file names may contain any. On a
    terminal they are wrapped between words. wrap: false for text to be copied."""
    columns = columns_of(sys.stdout) if wrap else None
    for line in map(in_one_line, map(str, lines)):
        for each in [line] if columns is None else fitted(line, columns):
            print(each)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    below: Sequence[str] = (),
) -> None:
    """Print a table; the columns named in `right` are right-aligned.

    On a narrow terminal, the last column is wrapped if it holds text; otherwise columns move into lines below their
    rows, those of `below` first. Words are never broken.
    """
    cells = [[in_one_line(cell) for cell in row] for row in rows]
    if title:
        put(title)
    for line in table_lines(columns, cells, right, below, columns_of(sys.stdout)):
        print(line)
    print()


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], below: Sequence[str], room: int | None
) -> list[str]:
    """Format a table in lines of at most `room` characters, unless a single word is longer."""
    widths = [max(map(_length, each)) for each in zip(columns, *rows, strict=True)]
    kept, wrapped = list(range(len(columns))), None
    first = [columns.index(name) for name in below if name in columns]
    while room is not None and sum(widths[i] + GAP for i in kept) > room:
        last = kept[-1]
        left = room - sum(widths[i] + GAP for i in kept[:-1]) - GAP
        longest = max((_length(word) for row in rows for word in row[last].split()), default=0)
        if len(kept) > 1 and columns[last] not in right and left >= max(LEAST_WRAPPED, longest):
            widths[last], wrapped = left, last
            break
        movable = [i for i in first if i in kept] or kept[:0:-1]
        if not movable:
            break
        kept.remove(movable[0])

    def line(texts: Sequence[str]) -> str:
        padded = []
        for text, i in zip(texts, kept, strict=True):
            space = " " * (widths[i] - _length(text))
            shown = coloured(text) if columns[i] in VERDICTS else text
            padded.append(space + text if columns[i] in right else shown + space)
        return f"{' ' * GAP}{(' ' * GAP).join(padded)}".rstrip()

    lines = [line([columns[i] for i in kept]), line(["-" * widths[i] for i in kept])]
    for row in rows:
        parts = {i: fitted(row[i], widths[i], hang=0) if i == wrapped else [row[i]] for i in kept}
        for number in range(max(map(len, parts.values()))):
            lines.append(line([parts[i][number] if number < len(parts[i]) else "" for i in kept]))
        moved = [f"{columns[i]}: {row[i]}".removeprefix(": ") for i in range(len(columns)) if i not in kept and row[i]]
        if moved and room is not None:
            lines += fitted(f"{' ' * GAP * 2}{'; '.join(moved)}", room)
    return lines


def _length(text: str) -> int:
    """Terminal columns of a text; wide characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
