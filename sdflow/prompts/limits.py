"""What a tokenizer cannot read of a prompt: text beyond a model's length, which is cut off with a warning that names it, and
half characters, which are an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sdflow.errors import UsageError


class TruncatedPrompt(UserWarning):
    """A prompt is longer than a text encoder reads."""


_COLLECTED: ContextVar[list[str] | None] = ContextVar("truncations", default=None)
"""Of this thread: where the messages go. A server answers with them, and does not log what its clients write."""


def require_texts(given: Mapping[str, Any]) -> None:
    """Raises UsageError for a text, alone or in a list, with a lone surrogate, half of a character, which no tokenizer reads:
    bytes of a command line that are not UTF-8 become such. given: by the names of the arguments."""
    for name, value in given.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            letters = enumerate(text) if isinstance(text, str) else ()
            place = next((index for index, letter in letters if "\ud800" <= letter <= "\udfff"), None)
            if place is not None:
                raise UsageError(
                    f"character {place + 1} is U+{ord(text[place]):04X}, half of a character (a lone surrogate)",
                    where=name,
                    remedy="Encode the text in UTF-8.",
                )


def report(messages: Iterable[str]) -> None:
    """Say what was cut off: to whoever collects it, else as warnings of Python's."""
    collected = _COLLECTED.get()
    for message in messages:
        if collected is None:
            warnings.warn(message, TruncatedPrompt, stacklevel=3)
        elif message not in collected:
            collected.append(message)


@contextmanager
def truncations() -> Iterator[list[str]]:
    """What is reported within, each once."""
    found: list[str] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)
