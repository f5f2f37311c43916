"""Parts of an unattended run: times, errors, results written to a file as they come, and turns on a shared device."""

from __future__ import annotations

import fcntl
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MADE = ".made"
"""The suffix of the file that says that a folder is whole."""
PATIENCE_SECONDS = 180
"""How long one waits for it."""


class Results:
    """What was found so far, in a file after each part; a part that fails is told, and the rest goes on."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.found, self.failed = path, dict[str, Any](), False

    def note(self) -> None:
        if self.path is not None:
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(self.found, indent=1))
            beside.replace(self.path)

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        except Exception:  # noqa: BLE001  the other parts are measured all the same
            self.failed = True
            error = traceback.format_exc()
            self.found.setdefault("errors", {})[what] = error
            print(f"--- {what} failed\n{error}", flush=True)
        seconds = time.perf_counter() - begun
        self.found.setdefault("seconds", {})[what] = seconds
        print(f"[{seconds:.1f} s] {what}", flush=True)
        self.note()


@contextmanager
def device_alone(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_for(path: Path) -> None:
    """Until with_weights.py has made it: it says so by a file beside it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not path.with_suffix(MADE).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not made within {PATIENCE_SECONDS} s")
        time.sleep(0.2)
