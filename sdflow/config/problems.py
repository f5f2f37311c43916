"""Collect the problems of a workflow, to report all at once, and suggest the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from sdflow.config.workflow import Mark
from sdflow.errors import Problem, WorkflowError

MOST_SAID = 500
"""Maximum characters of a message, which may quote a file."""

_LISTED = 12  # longer lists of known names are left out


class Problems:
    """The problems found so far."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, mark: Mark, message: str, remedy: str | None = None) -> None:
        shown = message if len(message) <= MOST_SAID else f"{message[:MOST_SAID]}..."
        self._found.append(mark.problem(shown, remedy))

    def extend(self, others: Problems, *, elsewhere: bool = False) -> None:
        """Add others' problems. elsewhere: only those at places without one so far."""
        places = {(each.file, each.line, each.column) for each in self._found} if elsewhere else set()
        self._found += [each for each in others._found if (each.file, each.line, each.column) not in places]

    def check(self) -> None:
        """Raises WorkflowError if there are any."""
        if self._found:
            raise WorkflowError(self._found)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A remedy for an unknown name: the most similar known one, or all of them if they are few."""
    names = list(dict.fromkeys(known))
    folded = {candidate.casefold(): candidate for candidate in reversed(names)}
    close = get_close_matches(name[:200].casefold(), folded, n=1, cutoff=0.6)
    if not close and len(name) > 2:
        close = [candidate for candidate in folded if name.casefold() in candidate][:1]
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    if not names:
        return None
    return f"known: {', '.join(names)}" if len(names) <= _LISTED else None
