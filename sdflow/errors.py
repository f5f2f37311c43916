"""Error classes, one per kind of failure, each with the exit status of the command line.

Every message answers three questions: where it happened, what was wrong, what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.printable import in_one_line, printable

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_PLACE = 1000
"""Characters of a place or a remedy: a path of any length may be in it."""
MOST_PROBLEMS = 50
"""Of a workflow, that are told one by one."""


def _shortened(text: str, most: int) -> str:
    text = printable(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


class SdflowError(Exception):
    """A failure that sdflow foresaw. `str()` gives the whole message; no traceback is owed to the user.

    What it quotes of an input may be of any length: a message is cut off at `longest`."""

    exit_code = 1
    longest = 2000

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = _shortened(what, self.longest)
        self.where = None if where is None else in_one_line(_shortened(where, MOST_PLACE))
        self.remedy = None if remedy is None else _shortened(remedy, MOST_PLACE)
        super().__init__(self.what)

    def __str__(self) -> str:
        located = f"{self.where}: {self.what}" if self.where else self.what
        return f"{located}\n  {self.remedy}" if self.remedy else located


class UsageError(SdflowError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 2


def first_problem(error: ValidationError) -> str:
    """The first complaint of pydantic's, behind its place: `submodels.unet.files.0.bytes: input should be ...`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(f"{part!s:.60}" for part in first["loc"])
    found = "" if first["type"] == "missing" else f", found {first['input']!r:.60}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}{found}"


def require_utf8(text: str, where: str) -> None:
    """Raises UsageError for a name whose bytes are not UTF-8: workflows, pipelines and the cache could not write it down."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!r} is not UTF-8", where=where, remedy="Rename it, or name another.") from error


@contextmanager
def os_errors_as(
    what: str,
    where: Path | str,
    remedy: str | None = None,
    kind: type[SdflowError] = UsageError,
    *,
    of_many: bool = False,
) -> Iterator[None]:
    """An OSError in here is raised as one of ours: what could not be done ("cannot be written"), and the system's reason.

    of_many: `where` is many files, and the one that the system names is told in its place."""
    try:
        yield
    except OSError as error:
        place = error.filename if of_many and error.filename else where
        raise kind(f"{what}: {error.strerror or error}", where=str(place), remedy=remedy) from error


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong in a workflow file. Lines and columns count from 1; 0 means that no place is known."""

    file: str
    line: int
    column: int
    message: str
    remedy: str | None = None

    def __str__(self) -> str:
        file = in_one_line(self.file)
        place = f"{file}:{self.line}:{self.column}" if self.line else file
        return f"{place}: {self.message}" + (f"\n  {self.remedy}" if self.remedy else "")


class WorkflowError(SdflowError):
    """A workflow is not valid. Carries every problem that was found, not just the first, and tells MOST_PROBLEMS."""

    exit_code = 2
    longest = MOST_PROBLEMS * 2000

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        shown = [str(problem) for problem in self.problems[:MOST_PROBLEMS]]
        if more := len(self.problems) - len(shown):
            shown.append(f"and {more:,} more")
        super().__init__("\n".join(shown))


class CheckpointError(SdflowError):
    """A checkpoint or a LoRA cannot be found, read, or used for what was asked."""

    exit_code = 2


class InputChanged(CheckpointError):
    """A file that is read is no longer the one that was looked at before: what came of it would lie under a wrong key."""


class PassError(SdflowError):
    """A pass failed, or its result does not keep what the pass or the workflow promises. It may end in a traceback of the
    user's own script."""

    exit_code = 3
    longest = 10_000


class WeightValueRead(PassError):
    """A pass that ran without weights looked at the values of one: its result may depend on them."""


class DamagedBase(PassError):
    """A model of the cache that another was to be made from is not what was published."""


class CacheError(SdflowError):
    """The cache cannot be read or written (disk full, permissions, a newer format)."""

    exit_code = 3


class VerificationError(SdflowError):
    """An artifact does not compute what the PyTorch model computes, or does not fit its target."""

    exit_code = 4


class TargetUnavailableError(SdflowError):
    """The target's execution provider is not on this machine and was required."""

    exit_code = 5


class TiledWarning(UserWarning):
    """A VAE works in tiles, since the memory would not do for the whole image: the image is a little different."""


class SlowerWarning(UserWarning):
    """It runs, and right, but not as fast as it should: the message says why."""
