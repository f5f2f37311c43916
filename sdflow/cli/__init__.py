"""The command line. `main` turns foreseen failures into a message on standard error and an exit status."""

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
"""Ctrl-C, a plain kill, and a closed terminal."""
SECONDS_TO_END = 2.5
_GOODBYE = "interrupted: no partial files are left; the next run resumes from here"


def main() -> NoReturn:
    """Entry point of the `sdflow` command. The README, "Commands", lists its exit statuses."""
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
            sys.stdout.flush()  # a full disk shows here, where it can be reported
            raise
    except SdflowError as error:
        _fail(error)
    except ImportError as error:
        from sdflow.machine.packages import of_missing_module

        missing = of_missing_module(error)
        if missing is None:
            raise
        _fail(missing)
    except stop.Stopped:
        for number in ENDING:  # while the interpreter exits they would kill it again
            signal.signal(number, signal.SIG_IGN)
        say(_GOODBYE)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone
        sys.exit(0)
    except OSError as error:
        if not _output_fails():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the output
        say(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(UsageError.exit_code)
    sys.exit(0)


def _fail(error: SdflowError) -> NoReturn:
    """Print the message on standard error, and with --json a document on standard output too, and exit."""
    say(f"error: {error}")
    if AS_JSON in sys.argv[1:]:
        from sdflow.report.output import print_error

        with suppress(OSError):
            print_error(error)
            sys.stdout.flush()
    sys.exit(error.exit_code)


def _open_standard_streams() -> None:
    """Open standard streams that the caller closed: another file would get their numbers, and with it library
    output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - open for the life of the process
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # escape characters that the encoding lacks instead of failing after the work
        sys.stdout.reconfigure(errors="backslashreplace")


def _require_utf8() -> None:
    """Raises UsageError for arguments, settings or a current folder that are not UTF-8, before any work is done."""
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
    """Drop remaining output if the terminal is closed: Python would exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _output_fails() -> bool:
    """Whether printing fails. Writes a line end directly: a failed buffered write would be tried again."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal of ENDING: the first one ends everything in order, later ones change nothing."""
    if stop.requested():
        return
    stop.tell()
    stop.end_children()  # before our code sees them end, or drops them
    raise stop.Stopped


def _watch_signals() -> None:
    """End the process SECONDS_TO_END after a signal of `_interrupt` at the latest, as a kill would: workers die with
    it, and the next run removes their folders.

    A handler runs in the main thread, between two Python instructions; a library call may last for seconds. So the
    system notifies a separate thread through a socket, and that thread ends a library's child processes at once.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a signal to a forked child is not for this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        with receiver, sender:
            while numbers := receiver.recv(64):
                if any(signal.getsignal(number) is _interrupt for number in numbers):
                    begun = time.monotonic()
                    stop.end_children()
                    time.sleep(max(0.0, begun + SECONDS_TO_END - time.monotonic()))
                    _end_now()

    threading.Thread(target=watch, daemon=True).start()


def _end_now() -> None:
    stop.end_children(seconds_to_clear=0)
    below = "\n" if os.isatty(2) else ""  # below a live progress line
    with suppress(OSError):
        os.write(2, f"{below}{_GOODBYE}\n".encode())
    os._exit(INTERRUPTED)
