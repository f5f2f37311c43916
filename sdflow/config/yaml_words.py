"""Explain invalid YAML in a writer's words: PyYAML and libyaml report errors in terms of their grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

_QUOTE_IT = "put the text in quotes"
_INDENT = "indent it like the keys that it belongs to"


@dataclass(frozen=True)
class Said:
    """message and remedy of a problem; mark: the parser's position."""

    message: str
    remedy: str | None
    mark: Any


def in_words(text: str, error: yaml.MarkedYAMLError) -> Said:
    """Explain the parser's complaint about a text; an unknown one is passed on unchanged."""
    problem, context = error.problem or "", error.context or ""
    here, opened = error.problem_mark or error.context_mark, error.context_mark
    if here is None:
        return Said(problem or "syntax error", None, None)
    place = _Place(text.splitlines(), here.line, here.column)
    if "mapping values are not allowed" in problem:
        return Said(*_colon(place), here)
    if "could not find expected ':'" in problem and opened is not None:
        return Said(*_no_colon(_Place(place.lines, opened.line, opened.column)), opened)
    if "quoted scalar" in context and ("end of stream" in problem or "document" in problem) and opened is not None:
        return Said("the quote that opens here is not closed", "close it, in the same line", opened)
    if "escape" in problem or "hexdecimal" in problem or "hexadecimal" in problem:
        return Said(
            "a backslash in double quotes begins an escape, and this is not a valid one",
            r"put a path in single quotes, 'C:\models\x.safetensors', or write its backslashes twice",
            here,
        )
    if "parsing a flow" in context and opened is not None:
        return Said(*_bracket(place, context, opened.line + 1), here)
    if "block sequence" in problem or "sequence entries" in problem:
        return Said("a list cannot begin on the line of its key", "begin it on the next line, or write [a, b]", here)
    if "parsing a block collection" in context and opened is not None:
        first = opened.line + 1
        message = f"this line is indented like an item of the list that begins in line {first}, but is not one"
        return Said(message, f"begin it with '- ', or {_INDENT}", here)
    if "parsing a block mapping" in context:
        return Said(*_key(place), here)
    return Said(*_start(place, problem, context), here)


@dataclass(frozen=True)
class _Place:
    """A position, counted from 0."""

    lines: list[str]
    line: int
    column: int

    @property
    def own(self) -> str:
        return self.lines[self.line] if self.line < len(self.lines) else ""

    @property
    def indent(self) -> int:
        return len(self.own) - len(self.own.lstrip(" "))

    @property
    def rest(self) -> str:
        return self.own[self.column :]

    def above(self) -> tuple[int, str]:
        """Number, from 1, and text of the last line above that is neither empty nor a comment."""
        for number in range(self.line, 0, -1):
            text = self.lines[number - 1]
            if text.strip() and not text.lstrip().startswith("#"):
                return number, text
        return 0, ""


def _colon(place: _Place) -> tuple[str, str]:
    before = place.own[: place.column]
    if re.search(r":\s", before):
        return "a second ': ' in this line", _QUOTE_IT
    number, above = place.above()
    if place.indent > len(above) - len(above.lstrip(" ")) and re.search(r":\s+\S", above):
        return (
            f"this line is indented deeper than line {number}, which already has a value",
            "indent it like that line, or leave that line without a value",
        )
    if glued := re.match(r"\s*([\w.-]+):\S", above):
        return f"line {number} has no space after '{glued[1]}:'", f"write '{glued[1]}: ...'"
    return f"unexpected ':': line {number} is not finished", "write every key as 'key: value'"


def _no_colon(place: _Place) -> tuple[str, str]:
    word = place.rest.strip()[:60]
    if glued := re.match(r"([\w.-]+):\S", word):
        return f"no space after '{glued[1]}:'", f"write '{glued[1]}: ...'"
    return f"{word!r} has no ':' after it", f"write {word}: VALUE; begin an item of a list with '- '"


def _bracket(place: _Place, context: str, line: int) -> tuple[str, str]:
    opening, closing = "{}" if "mapping" in context else "[]"
    if "node" in context:
        return "a value is missing here", "remove the extra comma"
    if place.rest[:1] in ("]", "}") and place.rest[:1] != closing:
        return f"{place.rest[0]!r} where '{closing}' closes what '{opening}' opened", f"write '{closing}'"
    return f"the '{opening}' of line {line} is not closed before this", f"close it with '{closing}', or add a comma"


def _key(place: _Place) -> tuple[str, str]:
    if place.rest[:1] in ("]", "}"):
        return f"{place.rest[0]!r} closes nothing", "remove it"
    if place.own[: place.column].strip():
        return "text after a complete value", "put all of it in quotes"
    if place.rest.startswith("- "):
        return "an item of a list where a key should be", "indent it below the key of its list"
    return f"this line is indented by {place.column} spaces, like none of the keys above", _INDENT


def _start(place: _Place, problem: str, context: str) -> tuple[str, str | None]:
    if "cannot start any token" in problem:
        return f"text cannot begin with {place.rest[:1]!r}", _QUOTE_IT
    if "alias" in context or "anchor" in context:
        return "text cannot begin with '*' or '&'", _QUOTE_IT
    if "tag" in problem or "tag" in context:
        return "text cannot begin with '!'", _QUOTE_IT
    if "block scalar" in context:
        return "text after '|' or '>'", f"begin it on the next line, indented, or {_QUOTE_IT}"
    return f"{problem or 'syntax error'}{f' ({context})' if context else ''}", None
