"""A console on standard error, if it is a terminal that can redraw lines."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console


def live_console() -> Console | None:
    """A console for live displays on standard error; None for a file, a pipe, or TERM=dumb."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    class SteadyConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Leave the cursor visible: a process that is killed or suspended could not restore it."""
            return False

    console = SteadyConsole(file=cast(IO[str], _UntilClosed(sys.stderr)))
    return console if console.is_terminal and console.is_interactive and not console.is_dumb_terminal else None


class _UntilClosed:
    """A terminal that may close while the command runs: further output is dropped, and the command continues."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def must_agree(what: str, *, yes: bool, command: str) -> None:
    """Ask for confirmation, unless `yes`. Raises UsageError if standard input is not a terminal."""
    from sdflow.errors import UsageError

    if not yes and not sys.stdin.isatty():
        raise UsageError(
            f"removing {what} must be confirmed, and standard input is not a terminal",
            where=command,
            remedy="Add --yes.",
        )
    if not yes:
        import typer

        typer.confirm(f"Remove {what}?", abort=True)
