"""The command line. `main` turns every foreseen failure into a message on standard error and its exit status."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sdflow import stop
from sdflow.cli.quiet import say
from sdflow.errors import SdflowError, UsageError, require_utf8

INTERRUPTED = 130
AS_JSON = "--json"
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a polite kill, and the terminal that is closed."""
SECONDS_TO_END = 2.5
_GOODBYE = "interrupted: nothing was left half-written; the next run goes on from here"


def main() -> NoReturn:
    """Entry point of the `sdflow` command. Exit status: see the README, "Commands"."""
    try:
        _main()
    finally:
        _give_up_unwritable()


def _main() -> NoReturn:
    _open_standard_streams()
    from sdflow.cli.app import app

    for number in ENDING:
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    _watch_signals()
    try:
        try:
            _require_utf8()
            app()
        except SystemExit:
            sys.stdout.flush()  # a full disk shows here, where it can be told
            raise
    except SdflowError as error:
        _fail(error)
    except ImportError as error:
        from sdflow.machine.packages import of_missing_module

        told = of_missing_module(error)
        if told is None:
            raise
        _fail(told)
    except stop.Stopped:
        for number in ENDING:  # at the interpreter's end they would kill it again
            signal.signal(number, signal.SIG_IGN)
        say(_GOODBYE)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody to tell
        sys.exit(0)
    except OSError as error:
        if not _output_fails():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        say(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(UsageError.exit_code)
    sys.exit(0)


def _fail(error: SdflowError) -> NoReturn:
    """Ends with the message on standard error, and with --json as a document on standard output too."""
    say(f"error: {error}")
    if AS_JSON in sys.argv[1:]:
        from sdflow.report.output import print_error

        with suppress(OSError):
            print_error(error)
            sys.stdout.flush()
    sys.exit(error.exit_code)


def _open_standard_streams() -> None:
    """Those that the caller closed: a file that is opened would take the number of one, and what a library prints go into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - it is open as long as the process lives
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # what its encoding lacks is spelled \\xe9: no reason to fail after the work
        sys.stdout.reconfigure(errors="backslashreplace")


def _require_utf8() -> None:
    """Raises UsageError for arguments, settings, and a current folder that could not be written down when all is done."""
    arguments = sys.argv[1:]
    if "--help" in arguments:
        return
    for argument in arguments:
        require_utf8(argument, "sdflow")
    for name, value in os.environ.items():
        if name.startswith("SDFLOW_"):
            require_utf8(value, name)
    with suppress(OSError):  # it was removed
        require_utf8(str(Path.cwd()), "the current folder")


def _give_up_unwritable() -> None:
    """What is left to print to a closed terminal is nothing to fail for: Python would make it exit status 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _output_fails() -> bool:
    """Whether nothing more can be printed. A line end is tried: of what failed nothing is left in a buffer to try again."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """One of ENDING: the first ends all in order, others change nothing."""
    if stop.requested():
        return
    stop.tell()
    stop.end_children()  # before anything here sees them end, or lets go of them
    raise stop.Stopped


def _watch_signals() -> None:
    """End all at the latest SECONDS_TO_END after a signal that `_interrupt` is there for, as a kill ends it: workers die with
    this process, and the next run clears their folders away.

    A handler runs in the main thread, between two of its Python instructions; a library's one may last for seconds. So a
    thread of its own is told by the system, through a socket, and ends what a library started at once.
    """
    here, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a signal to a child that was forked is not one to this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        with here, told:
            while numbers := here.recv(64):
                if any(signal.getsignal(number) is _interrupt for number in numbers):
                    begun = time.monotonic()
                    stop.end_children()
                    time.sleep(max(0.0, begun + SECONDS_TO_END - time.monotonic()))
                    _end_now()

    threading.Thread(target=watch, daemon=True).start()


def _end_now() -> None:
    stop.end_children(seconds_to_clear=0)
    below = "\n" if os.isatty(2) else ""  # of a line that is drawn again and again
    with suppress(OSError):
        os.write(2, f"{below}{_GOODBYE}\n".encode())
    os._exit(INTERRUPTED)
