"""How prompts are read: as diffusers reads them, or with the marks that people know from A1111's webui; and the words that
stand for learned vectors (textual inversion)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sdflow.errors import UsageError

SYNTAXES = ("plain", "a1111")
"""plain: every character is text. a1111: `sdflow.prompts.weights`."""


@dataclass(frozen=True)
class Reading:
    """How the prompts of a call are read.

    syntax: one of SYNTAXES. words: those that stand for learned vectors -> how many. In token ids the vectors are
    negative numbers: -1 is the last vector of the last word, so that no id of the vocabulary changes, and none is larger than
    that of the end. most: chunks that a text may have; None: any.
    """

    syntax: str = "plain"
    words: Mapping[str, int] = field(default_factory=dict)
    most: int | None = None

    def __post_init__(self) -> None:
        if self.syntax not in SYNTAXES:
            raise UsageError(
                f"no syntax of prompts is named {self.syntax!r}",
                where="prompt_syntax",
                remedy=f"Known: {', '.join(SYNTAXES)}.",
            )

    @property
    def plain(self) -> bool:
        """Whether texts are read as diffusers reads them, none longer than the model's length."""
        return self.syntax == "plain"

    def pieces(self, text: str) -> list[str | tuple[int, ...]]:
        """A text as texts, and ids where it names a word. Words are found whole, in small letters or capitals."""
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
        """The word that a negative id is a vector of. Raises KeyError."""
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
