"""Weights in prompts, as AUTOMATIC1111's stable-diffusion-webui reads them.

`(word)` weighs 1.1 times, `[word]` 1 / 1.1 times, `(word:1.3)` 1.3 times; brackets nest; one that is not closed goes to the
end. `\\(`, `\\[` and the like are the characters themselves. `BREAK` begins a new chunk.
Described in https://github.com/AUTOMATIC1111/stable-diffusion-webui/wiki/Features#attentionemphasis, and computed there by
`parse_prompt_attention` of modules/prompt_parser.py. One thing is different: there, a BREAK within brackets is a word.
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
    """A text, and how much it counts."""

    text: str
    weight: float


class _Sections:
    """What was read so far. Brackets change the weights behind the place where they opened."""

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
    """The sections between BREAKs, each as texts of one weight.

    Raises UsageError for a weight beyond all numbers.
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
                    f"{each.text[:40]!r} would have the weight {each.weight}",
                    where="prompt",
                    remedy="Around 1 is usual.",
                )
    return sections


def _number(text: str | None) -> float | None:
    """None for what only looks like a number: `1.2.3`."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
