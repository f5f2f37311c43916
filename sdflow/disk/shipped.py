"""What ships with sdflow beside its code: sample checkpoints, and the workflows that others extend."""

from __future__ import annotations

from pathlib import Path

import sdflow
from sdflow.disk.input_file import is_regular


def shipped_folders(name: str) -> tuple[Path, Path]:
    """Where a folder ("samples", "workflows") may lie: in the installed package's data, or beside the package in a checkout."""
    package = Path(sdflow.__file__).parent
    return package / "data" / name, package.parent / name


def shipped_workflow(reference: str) -> Path | None:
    """A workflow that ships with sdflow, named as `base/sd15.yaml`; None where there is none of that name."""
    if Path(reference).is_absolute() or ".." in Path(reference).parts or Path(reference).parts[:1] != ("base",):
        return None
    found = (folder / reference for folder in shipped_folders("workflows"))
    return next((path for path in found if is_regular(path)), None)


def shipped_workflows() -> tuple[str, ...]:
    """The names of all workflows that ship with sdflow to be extended."""
    names = {
        f"base/{path.name}" for folder in shipped_folders("workflows") for path in (folder / "base").glob("*.yaml")
    }
    return tuple(sorted(names))
