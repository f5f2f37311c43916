"""Text of others, as it may be shown on a terminal."""

from __future__ import annotations

import re

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, what turns the direction of the text, and halves of characters, which no
terminal is given: names of files that are no UTF-8 have them."""


def printable(text: str) -> str:
    """The text with what a terminal takes for commands spelled as Python does: \\x1b for the escape character."""
    return _COMMANDS.sub(lambda found: ascii(found.group())[1:-1], text)
