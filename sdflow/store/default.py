"""The default cache folder."""

from __future__ import annotations

from pathlib import Path

import sdflow
from sdflow.errors import UsageError

VARIABLE = "SDFLOW_CACHE"


def default_cache() -> Path:
    """Return `cache` in the checkout that sdflow runs from if the current folder is in it, else the user's. Raises
    UsageError if the user has no folder for caches."""
    from platformdirs import user_cache_path

    if (checkout := _checkout()) is not None:
        return Path("cache") if checkout == Path.cwd() else checkout / "cache"
    users = user_cache_path("sdflow", appauthor=False)
    if not users.is_absolute():  # containers have users without a passwd entry and HOME
        raise UsageError(
            "this user has no cache folder",
            where=str(users),
            remedy=f"Set one with --cache FOLDER or {VARIABLE}=FOLDER.",
        )
    return users / "builds"


def _checkout() -> Path | None:
    root = Path(sdflow.__file__).resolve().parent.parent
    try:
        inside = Path.cwd().resolve().is_relative_to(root)
    except OSError:  # the current folder was removed
        return None
    return root if inside and (root / "pyproject.toml").is_file() and (root / "tests").is_dir() else None
