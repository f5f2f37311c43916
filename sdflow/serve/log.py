"""The server's log on standard error: one JSON line per event, including output of libraries and Python itself."""

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
"""Environment variable: the file that receives standard error and is to be rotated; set by `sdflow deploy`."""

MOST_BYTES = 10 << 20
"""Size at which the log file is moved to FILE.1, replacing the previous one."""


def log_line(event: str, **fields: Any) -> None:
    """Write one JSON line to standard error. A line that cannot be written, as on a full disk, is dropped."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"time": stamp, "event": event, **fields}, ensure_ascii=False, default=str) + "\n"
    with suppress(OSError):
        _write(line)
        if path := os.environ.get(ROTATED):
            rotate(Path(path))


def _write(line: str) -> None:
    """Bypass Python's buffer, which a signal handler that logs must not re-enter during a write."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # sys.stderr was replaced
        sys.stderr.write(line)
        sys.stderr.flush()
        return
    left = line.encode(errors="backslashreplace")
    while left:
        left = left[os.write(descriptor, left) :]


def rotate(path: Path) -> None:
    """Start the file anew above MOST_BYTES. It is copied and truncated, because other processes append to it."""
    if path.stat().st_size > MOST_BYTES:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


class JsonHandler(logging.Handler):
    """Writes library logs as JSON lines."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname.lower(), "logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        log_line("log", **fields, message=record.getMessage())


def log_as_json() -> None:
    """Redirect library logs, warnings and uncaught exceptions of this process to the JSON log."""
    logging.basicConfig(handlers=[JsonHandler()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}"
    sys.excepthook = lambda kind, error, _: log_error(error)


def log_error(error: BaseException) -> None:
    """Log an unexpected error with its traceback."""
    said = "".join(traceback.format_exception(error))
    log_line("error", kind=type(error).__name__, message=str(error), traceback=said)
