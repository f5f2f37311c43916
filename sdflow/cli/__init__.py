"""The command line. `main` turns every foreseen failure into a message on standard error and its exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from sdflow import stop
from sdflow.errors import SdflowError

INTERRUPTED = 130
SECONDS_TO_END = 2.5
_GOODBYE = "interrupted: nothing was left half-written; the next run goes on from here"


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
    except stop.Stopped:
        for number in (signal.SIGINT, signal.SIGTERM):  # at the interpreter's end they would kill it again
            signal.signal(number, signal.SIG_IGN)
        print(_GOODBYE, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody to tell
        sys.exit(0)
    sys.exit(0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C or SIGTERM: the first ends all in order, others change nothing. What has not ended by then ends all the same,
    as a kill ends it: workers die with this process, and the next run clears their folders away."""
    if stop.told():
        return
    stop.tell()
    limit = threading.Timer(SECONDS_TO_END, _end_now)
    limit.daemon = True
    limit.start()
    stop.end_children()  # before anything here sees them end, or lets go of them
    raise stop.Stopped


def _end_now() -> None:
    stop.end_children()
    os.write(2, f"{_GOODBYE}\n".encode())
    os._exit(INTERRUPTED)
