"""The two forms of output: a table, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMAT_VERSION = 1
PLAIN_WIDTH = 200  # when standard output is no terminal: wide enough that no cell is cut


def print_json(kind: str, content: Mapping[str, Any]) -> None:
    """One JSON document with its format version and what it is."""
    print(json.dumps({"format_version": FORMAT_VERSION, "kind": kind, **content}, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table; the columns named in `right` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    Console(width=width, highlight=False, markup=False).print(table)
