"""The key that requests bring, from its file. Clients read it too: they need none of the server's packages."""

from __future__ import annotations

from pathlib import Path

from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError


def read_key(path: Path) -> str:
    """The key in a file: its first line. Raises UsageError."""
    try:
        key = read_input(path).decode("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(path), remedy="A file with the key on its first line."
        ) from error
    if not key:
        raise UsageError("there is no key in it", where=str(path), remedy="Write one on its first line.")
    return key
