"""The command line. `main` turns every foreseen failure into a message on standard error and its exit status."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from sdflow.errors import SdflowError

INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point of the `sdflow` command. Exit status: see the README, "Commands"."""
    from sdflow.cli.app import app

    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except SdflowError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Interrupted:
        print("interrupted: nothing was left half-written; the next run goes on from here", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody to tell
        sys.exit(0)
    sys.exit(0)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt: typer would end that one by itself, without a word."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted
