"""Make untrusted text safe for terminals, and wrap it."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tabs and line ends, characters that change the text's direction, and lone surrogates,
which stand for bytes of file names that are not UTF-8."""


def printable(text: str) -> str:
    """Return the text with terminal control characters escaped as in Python: \\x1b for the escape character."""
    return _COMMANDS.sub(lambda found: ascii(found.group())[1:-1], text)


def in_one_line(text: str) -> str:
    """Like `printable`, with line ends and tabs escaped too: for paths, which may contain any character."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|ms|min|s)\b)")


def fitted(text: str, columns: int, hang: int = 2) -> list[str]:
    """Wrap text for a terminal, with continuation lines indented by `hang` more. Words are not broken, numbers stay
    with their units; a word longer than a line gets one of its own, which the terminal wraps."""
    lines = []
    for line in text.split("\n"):
        own = len(line) - len(line.lstrip(" "))
        wrapped = textwrap.wrap(
            _BEFORE_UNIT.sub("\xa0", line),
            max(columns, 1),
            subsequent_indent=" " * min(own + hang, columns // 4),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += [each.replace("\xa0", " ") for each in wrapped] or [""]
    return lines


def takes_colour(file: IO[str]) -> bool:
    """Whether a file is a terminal that supports colours, and the user wants them (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty():
        return False
    return os.name != "nt" or any(name in os.environ for name in ("WT_SESSION", "ANSICON", "TERM"))


def columns_of(file: IO[str]) -> int | None:
    """The width of the terminal that a file is connected to; None if it is not a terminal."""
    if not file.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(file.fileno()).columns or 80  # a pseudo-terminal may have a size of 0
    except OSError:  # closed
        return 80
