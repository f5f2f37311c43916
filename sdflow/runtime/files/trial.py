"""Tokenizers and feature extractors are tried when they are loaded: their libraries read a config without looking at it."""

from __future__ import annotations

from typing import Any

from sdflow.errors import UsageError
from sdflow.sources.companion_entries import MOST_PIXELS

MOST_TOKENS = 1 << 18
"""Of any text model's tokenizer; Qwen3's reads 131,072."""
MOST_PADDING = 1 << 12
"""Tokens that a text is padded to when tokenizers are tried and compared: padding is made in memory."""

_FAILURES = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError, MemoryError)


def try_companion(loaded: Any, where: str, remedy: str) -> None:
    """Read a word, or an image of a few pixels. Raises UsageError for what cannot do that. A scheduler is left alone."""
    try:
        if hasattr(loaded, "model_max_length"):
            _try_tokenizer(loaded)
        elif hasattr(loaded, "preprocess"):
            _try_extractor(loaded)
    except _FAILURES as error:
        raise UsageError(
            f"its config does not fit: {error or type(error).__name__}", where=where, remedy=remedy
        ) from error


def _try_tokenizer(tokenizer: Any) -> None:
    length = tokenizer.model_max_length
    if type(length) is not int or not 0 < length <= MOST_TOKENS:
        raise ValueError(f"model_max_length is {length!r:.40}")
    tokenizer("a", padding="max_length", max_length=min(length, MOST_PADDING), truncation=True)


def _try_extractor(extractor: Any) -> None:
    from PIL import Image

    for name in ("size", "crop_size"):
        sizes = getattr(extractor, name, None)
        for size in dict(sizes or {}).values():
            if size is not None and (type(size) is not int or not 0 < size <= MOST_PIXELS):
                raise ValueError(f"{name} is {size!r:.40}")
    extractor(Image.new("RGB", (8, 8)), return_tensors="pt")
