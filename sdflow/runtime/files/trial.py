"""Try tokenizers and feature extractors when they are loaded: their libraries do not validate configs."""

from __future__ import annotations

from typing import Any

from sdflow.errors import UsageError
from sdflow.sources.companion_entries import MOST_PIXELS

MOST_TOKENS = 1 << 18
"""Upper limit on model_max_length; no model has more."""
MOST_TRIED = 1 << 10
"""Maximum padded length in a trial, to limit memory."""

_FAILURES = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError, MemoryError)


def try_companion(loaded: Any, where: str, remedy: str) -> None:
    """Run it on a word or a tiny image. Raises UsageError if that fails. Schedulers are not tried."""
    try:
        if hasattr(loaded, "model_max_length"):
            _try_tokenizer(loaded)
        elif hasattr(loaded, "preprocess"):
            _try_extractor(loaded)
    except _FAILURES as error:
        raise UsageError(
            f"its config is invalid: {error or type(error).__name__}", where=where, remedy=remedy
        ) from error


def _try_tokenizer(tokenizer: Any) -> None:
    length = tokenizer.model_max_length
    if type(length) is not int or not 0 < length <= MOST_TOKENS:
        raise ValueError(f"model_max_length is {length!r:.40}")
    tokenizer("a", padding="max_length", max_length=min(length, MOST_TRIED), truncation=True)


def _try_extractor(extractor: Any) -> None:
    from PIL import Image

    for name in ("size", "crop_size"):
        sizes = getattr(extractor, name, None)
        for size in dict(sizes or {}).values():
            if size is not None and (type(size) is not int or not 0 < size <= MOST_PIXELS):
                raise ValueError(f"{name} is {size!r:.40}")
    extractor(Image.new("RGB", (8, 8)), return_tensors="pt")
