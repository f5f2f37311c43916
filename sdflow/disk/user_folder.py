"""Folders for data of a user and machine, not of a pipeline or its cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdflow.errors import UsageError, os_errors_as


def user_folder(name: str, variable: str) -> Path:
    """The folder in the environment variable, otherwise `sdflow/<name>` in the user's cache folder; it may not exist
    yet.

    Raises UsageError if neither is available.
    """
    if named := os.environ.get(variable):
        return Path(named)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a passwd entry and HOME, as in containers
        raise UsageError(f"no folder for {name}: {error}", remedy=f"Name one: {variable}=FOLDER.") from error
    return caches / "sdflow" / name


@contextmanager
def writing(what: str, where: Path, variable: str) -> Iterator[None]:
    """Raise UsageError in place of an OSError. what: the plural of what is written. variable: sets another folder."""
    with os_errors_as(f"no {what} can be stored there", where, f"Name another folder: {variable}=FOLDER."):
        yield
