"""Bars behind the rows of a table, on a terminal that has room for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sdflow.printable import columns_of
from sdflow.report.output import GAP

BARS = " "
"""The head of their column."""
LEAST, MOST = 10, 40
_EIGHTHS = "▏▎▍▌▋▊▉"


def room_beside(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The columns of a terminal that a table leaves; 0 for a file, and where no blocks can be printed."""
    room, encoding = columns_of(sys.stdout), (sys.stdout.encoding or "").lower()
    if room is None or not encoding.startswith("utf"):
        return 0
    taken = sum(max(map(len, each)) + GAP for each in zip(columns, *rows, strict=True))
    return room - taken - GAP


def bars(values: Sequence[float], room: int) -> list[str] | None:
    """A bar for each value, the longest one as long as there is room; None where that is too little."""
    if not values or room < LEAST or max(values) <= 0:
        return None
    eighths = [max(1, round(value / max(values) * min(room, MOST) * 8)) for value in values]
    return ["█" * (each // 8) + (_EIGHTHS[each % 8 - 1] if each % 8 else "") for each in eighths]
