"""The server's log: a line of JSON for each event on standard error, also for what libraries and Python itself say."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

ROTATED = "SDFLOW_LOG_FILE"
"""Names the file that standard error goes to, if the server is to keep it short: `sdflow deploy` sets it."""

MOST_BYTES = 10 << 20
"""Of that file. Then it becomes FILE.1, in the place of the one before."""


def log_line(event: str, **fields: Any) -> None:
    """One line of JSON on standard error. Where that cannot be written, as on a full disk, it is lost, and no request with it."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"time": stamp, "event": event, **fields}, ensure_ascii=False, default=str) + "\n"
    with suppress(OSError):
        _write(line)
        if path := os.environ.get(ROTATED):
            rotate(Path(path))


def _write(line: str) -> None:
    """Past Python's buffer, which a signal handler that logs must not enter while a line is being written."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # somebody has put something else in its place
        sys.stderr.write(line)
        sys.stderr.flush()
        return
    left = line.encode(errors="backslashreplace")
    while left:
        left = left[os.write(descriptor, left) :]


def rotate(path: Path, most: int = MOST_BYTES) -> None:
    """Begin anew if the file has more bytes. It is copied and cut off: other processes append to the same file."""
    if path.stat().st_size > most:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


class JsonHandler(logging.Handler):
    """Writes what libraries log as such lines."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname.lower(), "logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        log_line("log", **fields, message=record.getMessage())


def log_as_json() -> None:
    """From now on this process writes nothing else: what libraries log, warnings, and errors that nobody caught."""
    logging.basicConfig(handlers=[JsonHandler()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}"
    sys.excepthook = lambda kind, error, _: log_error(error)


def log_error(error: BaseException) -> None:
    """One that nobody foresaw, with its traceback."""
    said = "".join(traceback.format_exception(error))
    log_line("error", kind=type(error).__name__, message=str(error), traceback=said)
