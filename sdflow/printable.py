"""Text of others, as it may be shown on a terminal."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, what turns the direction of the text, and halves of characters, which no
terminal is given: names of files that are no UTF-8 have them."""


def printable(text: str) -> str:
    """The text with what a terminal takes for commands spelled as Python does: \\x1b for the escape character."""
    return _COMMANDS.sub(lambda found: ascii(found.group())[1:-1], text)


def in_one_line(text: str) -> str:
    """The same, with line ends and tabs spelled too: for a path, which may have any character in it."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|ms|min|s)\b)")


def fitted(text: str, columns: int, hang: int = 2) -> list[str]:
    """The text in lines of a terminal, those that go on indented by `hang` more. No word is broken, nor a number parted from
    its unit; a word that is longer than a line has one to itself, which the terminal wraps."""
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
    """Whether a file is a terminal that shows colours, and its user wants them (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty():
        return False
    return os.name != "nt" or any(name in os.environ for name in ("WT_SESSION", "ANSICON", "TERM"))


def columns_of(file: IO[str]) -> int | None:
    """The width of the terminal that a file is; None for any other file."""
    if not file.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(file.fileno()).columns or 80  # a pseudo-terminal may have a size of 0
    except OSError:  # closed
        return 80
