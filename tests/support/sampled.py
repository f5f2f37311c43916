"""Which of many similar cases run by default. The others are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *properties: Callable[[Any], Any]) -> list[Any]:
    """The cases, for `parametrize` or a fixture: by default so few that every value of every property occurs.

    Without properties they are the items of a case, which then is a tuple: every value of every parameter occurs.
    """
    cases = list(cases)
    shown = [set(enumerate([read(case) for read in properties] if properties else case)) for case in cases]
    missing = set().union(*shown)
    chosen = set()
    while missing:
        most = max(range(len(cases)), key=lambda i: len(shown[i] & missing))
        chosen.add(most)
        missing -= shown[most]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if i in chosen else pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
