"""The two forms of output: a table, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMAT_VERSION = 1


def print_json(kind: str, content: Mapping[str, Any]) -> None:
    """One JSON document with its format version and what it is."""
    print(json.dumps({"format_version": FORMAT_VERSION, "kind": kind, **content}, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table; the columns named in `right` are aligned to the right. In a file or pipe: plain text, one line a row."""
    if not sys.stdout.isatty():
        _print_plain(title, columns, list(rows), right)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if title:
        print(title)
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = zip(row, columns, widths, strict=True)
        line = "  ".join(f"{cell:>{width}}" if name in right else f"{cell:<{width}}" for cell, name, width in cells)
        print(f"  {line}".rstrip())
    print()
