"""Limits of tokenizers: text beyond a model's length is truncated with a warning that quotes it; half characters are an
error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sdflow.errors import UsageError


class TruncatedPrompt(UserWarning):
    """A prompt exceeds a text encoder's token limit."""


_COLLECTED: ContextVar[list[str] | None] = ContextVar("truncations", default=None)
"""This thread's collector of messages. A server returns them instead of logging its clients' prompts."""


def require_texts(given: Mapping[str, Any]) -> None:
    """Raise UsageError for a text, alone or in a list, with a lone surrogate, which no tokenizer accepts; non-UTF-8
    bytes on a command line become surrogates. given: by argument name."""
    for name, value in given.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            letters = enumerate(text) if isinstance(text, str) else ()
            place = next((index for index, letter in letters if "\ud800" <= letter <= "\udfff"), None)
            if place is not None:
                raise UsageError(
                    f"character {place + 1} is U+{ord(text[place]):04X}, a lone surrogate (half of a character)",
                    where=name,
                    remedy="Encode the text in UTF-8.",
                )


def report(messages: Iterable[str]) -> None:
    """Report truncations to the collector, or as Python warnings without one."""
    collected = _COLLECTED.get()
    for message in messages:
        if collected is None:
            warnings.warn(message, TruncatedPrompt, stacklevel=3)
        elif message not in collected:
            collected.append(message)


@contextmanager
def truncations() -> Iterator[list[str]]:
    """Collect messages reported inside, each once."""
    found: list[str] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)
