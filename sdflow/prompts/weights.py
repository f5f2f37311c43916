"""Prompt weights in the syntax of AUTOMATIC1111's stable-diffusion-webui.

`(word)` multiplies the weight by 1.1, `[word]` by 1 / 1.1, `(word:1.3)` by 1.3; brackets nest; an unclosed one extends
to the end. `\\(`, `\\[` etc. are literal characters. `BREAK` starts a new chunk.
See https://github.com/AUTOMATIC1111/stable-diffusion-webui/wiki/Features#attentionemphasis, implemented there by
`parse_prompt_attention` in modules/prompt_parser.py. One difference: there, a BREAK within brackets is a word.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sdflow.errors import UsageError

ROUND, SQUARE = 1.1, 1 / 1.1

_MARK = re.compile(r"\\[()\[\]\\]|\\|[(\[]|:\s*(?P<weight>[+-]?[.\d]+)\s*\)|[)\]]|:|[^\\()\[\]:]+")
BREAK = re.compile(r"\s*\bBREAK\b\s*")


@dataclass(frozen=True)
class Weighted:
    """A text with its weight."""

    text: str
    weight: float


class _Sections:
    """Parser state. A closing bracket changes all weights since its opening."""

    def __init__(self) -> None:
        self.texts: list[str | None] = []
        self.weights: list[float] = []
        self.open: dict[str, list[int]] = {"(": [], "[": []}

    def add(self, text: str | None) -> None:
        self.texts.append(text)
        self.weights.append(1.0)

    def close(self, bracket: str, weight: float) -> None:
        self._weigh(self.open[bracket].pop(), weight)

    def end(self) -> list[list[Weighted]]:
        for bracket, weight in (("(", ROUND), ("[", SQUARE)):
            for begin in self.open[bracket]:
                self._weigh(begin, weight)
        sections: list[list[Weighted]] = [[]]
        for text, weight in zip(self.texts, self.weights, strict=True):
            section = sections[-1]
            if text is None:
                sections.append([])
            elif section and section[-1].weight == weight:
                section[-1] = Weighted(section[-1].text + text, weight)
            else:
                section.append(Weighted(text, weight))
        return sections

    def _weigh(self, begin: int, weight: float) -> None:
        for index in range(begin, len(self.weights)):
            self.weights[index] *= weight


def parse(prompt: str) -> list[list[Weighted]]:
    """Return the sections between BREAKs, each as texts of one weight.

    Raises UsageError for an infinite weight.
    """
    read = _Sections()
    for match in _MARK.finditer(prompt):
        mark, weight = match[0], _number(match["weight"])
        if mark.startswith("\\"):
            read.add(mark[1:])
        elif mark in read.open:
            read.open[mark].append(len(read.texts))
        elif weight is not None and read.open["("]:
            read.close("(", weight)
        elif mark == ")" and read.open["("]:
            read.close("(", ROUND)
        elif mark == "]" and read.open["["]:
            read.close("[", SQUARE)
        else:
            for index, part in enumerate(BREAK.split(mark)):
                if index:
                    read.add(None)
                read.add(part)
    sections = read.end()
    for section in sections:
        for each in section:
            if not math.isfinite(each.weight):
                raise UsageError(
                    f"{each.text[:40]!r} has the weight {each.weight}",
                    where="prompt",
                    remedy="Use weights around 1.",
                )
    return sections


def _number(text: str | None) -> float | None:
    """Return None for text that only looks like a number, such as `1.2.3`."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
