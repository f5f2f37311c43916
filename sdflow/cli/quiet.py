"""What a command says on standard error, and that the libraries say nothing there."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from sdflow.printable import columns_of, fitted, printable, takes_colour


def say(text: str) -> None:
    """Print a line. One that nobody can read (the terminal was closed, the pipe's reader ended) is lost; the work is not."""
    text = printable(text)
    if (columns := columns_of(sys.stderr)) is not None:
        text = "\n".join(fitted(text, columns))
    if text.startswith("error: ") and takes_colour(sys.stderr):
        text = f"\x1b[1;31merror:\x1b[0m{text.removeprefix('error:')}"
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")  # in one piece: others may write too
        sys.stderr.flush()


def quiet_libraries() -> None:
    """To be called before they are imported: they ask no host, and warn of nothing that a user could mend."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
