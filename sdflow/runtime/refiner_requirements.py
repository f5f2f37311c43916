"""What is refused beside a refiner, whoever asks: an option, a call in Python, a measurement."""

from __future__ import annotations

from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import Approximation


def require_exact(fewer: Approximation, remedy: str) -> None:
    """Raises UsageError for images that leave something out."""
    if fewer:
        raise UsageError(
            "it is not known how much of that a refiner bears", where=", ".join(fewer.settings()), remedy=remedy
        )


def require_no_mask(mask: Any, where: str, remedy: str) -> None:
    """Raises UsageError for a mask; None: there is none."""
    if mask is not None:
        raise UsageError(
            "a refiner draws the whole image, and would not keep what is behind the mask", where=where, remedy=remedy
        )
