"""Settings that are rejected together with a refiner, in the CLI, Python and benchmarks."""

from __future__ import annotations

from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import Approximation


def require_exact(fewer: Approximation, remedy: str) -> None:
    """Raise UsageError if an approximation is set."""
    if fewer:
        raise UsageError("approximations are untested with a refiner", where=", ".join(fewer.settings()), remedy=remedy)


def require_no_mask(mask: Any, where: str, remedy: str) -> None:
    """Raise UsageError unless mask is None."""
    if mask is not None:
        raise UsageError(
            "a refiner redraws the whole image, including the area outside the mask", where=where, remedy=remedy
        )
