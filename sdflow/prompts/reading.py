"""Interpretation of prompts: plain as in diffusers, or with A1111's syntax; and textual inversion words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sdflow.errors import UsageError

SYNTAXES = ("plain", "a1111")
"""plain: all characters are literal. a1111: `sdflow.prompts.weights`."""


@dataclass(frozen=True)
class Reading:
    """How a call's prompts are interpreted.

    syntax: one of SYNTAXES. words: textual inversion word -> number of vectors. In token ids, vectors are negative
    numbers, -1 being the last vector of the last word, so that vocabulary ids are unchanged and the end token keeps the
    largest id. most: maximum number of chunks per text; None: unlimited.
    """

    syntax: str = "plain"
    words: Mapping[str, int] = field(default_factory=dict)
    most: int | None = None

    def __post_init__(self) -> None:
        if self.syntax not in SYNTAXES:
            raise UsageError(
                f"unknown prompt syntax {self.syntax!r}",
                where="prompt_syntax",
                remedy=f"Known: {', '.join(SYNTAXES)}.",
            )

    @property
    def plain(self) -> bool:
        """Whether texts are read as in diffusers, limited to the model's length."""
        return self.syntax == "plain"

    def pieces(self, text: str) -> list[str | tuple[int, ...]]:
        """Split a text into texts, and ids for words. Words match whole, in any case."""
        if not self.words:
            return [text]
        found: list[str | tuple[int, ...]] = []
        for index, piece in enumerate(self._pattern.split(text)):
            if index % 2:
                found.append(self._ids[piece.lower()])
            elif piece.strip():
                found.append(piece)
        return found

    def word_of(self, token: int) -> str:
        """Return the word that a negative id belongs to. Raises KeyError."""
        return self._word_of[token]

    @cached_property
    def _word_of(self) -> dict[int, str]:
        return {token: word for word, ids in self._ids.items() for token in ids}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.words, key=len, reverse=True)
        return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])", re.IGNORECASE)

    @cached_property
    def _ids(self) -> dict[str, tuple[int, ...]]:
        ids, begin = {}, -sum(self.words.values())
        for word, count in self.words.items():
            ids[word.lower()] = tuple(range(begin, begin + count))
            begin += count
        return ids


PLAIN = Reading()
