"""Messages on standard error, and silence for the libraries' own."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from sdflow.printable import columns_of, fitted, printable, takes_colour


def say(text: str) -> None:
    """Print a line. If nobody can read it (closed terminal or pipe), the line is lost and the work continues."""
    text = printable(text)
    if (columns := columns_of(sys.stderr)) is not None:
        text = "\n".join(fitted(text, columns))
    if text.startswith("error: ") and takes_colour(sys.stderr):
        text = f"\x1b[1;31merror:\x1b[0m{text.removeprefix('error:')}"
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")  # in one write: other threads may write too
        sys.stderr.flush()


def quiet_libraries() -> None:
    """Keep libraries offline and silence warnings that users cannot act on. Call before importing them."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
