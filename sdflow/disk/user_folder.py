"""Where sdflow keeps what belongs to a user and a machine, not to a pipeline or its cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdflow.errors import UsageError, os_errors_as


def user_folder(name: str, variable: str) -> Path:
    """The folder that the environment variable names, else `sdflow/<name>` in the user's cache folder; it may not exist yet.

    Raises UsageError when there is neither.
    """
    if named := os.environ.get(variable):
        return Path(named)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without an entry and without HOME, as containers have them
        raise UsageError(f"no folder for {name}: {error}", remedy=f"Name one: {variable}=FOLDER.") from error
    return caches / "sdflow" / name


@contextmanager
def writing(what: str, where: Path, variable: str) -> Iterator[None]:
    """Raises UsageError in place of an OSError. what: is written there, in the plural. variable: names another folder."""
    with os_errors_as(f"no {what} can be kept there", where, f"Name another folder: {variable}=FOLDER."):
        yield
