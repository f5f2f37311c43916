"""Error classes, one per kind of failure, each with its exit status.

Every message says where it happened, what was wrong, and what to do about it.
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
"""Maximum characters of a place or a remedy: either may quote a path of any length."""
MOST_PROBLEMS = 50
"""Maximum number of problems that a WorkflowError prints."""


def _shortened(text: str, most: int) -> str:
    text = printable(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


class SdflowError(Exception):
    """A failure that sdflow foresees. `str()` gives the whole message; users need no traceback.

    Quotes from an input may be of any length, so the message is cut off at `longest` characters."""

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
    """pydantic's first complaint, prefixed with its place: `submodels.unet.files.0.bytes: input should be ...`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(f"{part!s:.60}" for part in first["loc"])
    found = "" if first["type"] == "missing" else f", found {first['input']!r:.60}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}{found}"


def require_utf8(text: str, where: str) -> None:
    """Raises UsageError for a name that is not UTF-8: workflows, pipelines and the cache could not store it."""
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
    """Raise an OSError of the block as `kind`: `what` could not be done ("cannot be written"), and the system's reason.

    of_many: `where` stands for many files; the message names the one that the system reports."""
    try:
        yield
    except OSError as error:
        place = error.filename if of_many and error.filename else where
        raise kind(f"{what}: {error.strerror or error}", where=str(place), remedy=remedy) from error


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a workflow file. Lines and columns count from 1; line 0 means that the place is unknown."""

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
    """An invalid workflow. Carries every problem found and prints the first MOST_PROBLEMS."""

    exit_code = 2
    longest = MOST_PROBLEMS * 2000

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        shown = [str(problem) for problem in self.problems[:MOST_PROBLEMS]]
        if more := len(self.problems) - len(shown):
            shown.append(f"and {more:,} more")
        super().__init__("\n".join(shown))


class CheckpointError(SdflowError):
    """A checkpoint or a LoRA cannot be found, read, or used as requested."""

    exit_code = 2


class InputChanged(CheckpointError):
    """An input file changed while in use: its results would be stored under a wrong key."""


class PassError(SdflowError):
    """A pass failed, or its result breaks a promise of the pass or the workflow. May include a traceback of a user
    script."""

    exit_code = 3
    longest = 10_000


class WeightValueRead(PassError):
    """A pass running without weights read a weight's values: its result may depend on them."""


class DamagedBase(PassError):
    """A cached model that another is derived from no longer matches what was published."""


class CacheError(SdflowError):
    """The cache cannot be read or written (disk full, permissions, a newer format)."""

    exit_code = 3


class VerificationError(SdflowError):
    """An artifact does not compute what the PyTorch model computes, or does not suit its target."""

    exit_code = 4


class TargetUnavailableError(SdflowError):
    """The target's execution provider is required and not available on this machine."""

    exit_code = 5


class TiledWarning(UserWarning):
    """A VAE runs in bands of rows because the whole image does not fit in memory. The image is the same except for rounding;
    if the message names tiles instead of bands, it differs slightly."""


class SlowerWarning(UserWarning):
    """The result is right but slower than it should be; the message says why."""
