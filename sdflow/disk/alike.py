"""Names of files that are like one that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import PurePath


def alike(name: str, known: Iterable[str]) -> str | None:
    """The file name that is most similar to one that is not there, endings aside; None where none is similar.

    An ending that two names share says nothing about them: m9.yaml is not what nope.yaml was meant to be.
    """
    others = [each for each in dict.fromkeys(known) if each != name]
    stems = {PurePath(each).stem.casefold(): each for each in reversed(others)}
    stem = PurePath(name[:200]).stem.casefold()
    close = get_close_matches(stem, stems, n=1, cutoff=0.6)
    if not close and len(stem) > 2:
        close = [each for each in stems if stem in each][:1]
    return stems[close[0]] if close else None
