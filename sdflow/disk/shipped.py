"""What ships with sdflow beside its code: sample checkpoints, and the workflows that others extend."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import sdflow
from sdflow.disk.input_file import is_regular

FAMILIES_ELSEWHERE = "sdflow_families"
"""The namespace package of families that do not ship with sdflow: each a package with `family.py`, which has a `FAMILY`, and
beside it its `architectures/` and its `workflows/base/`. Tests define families there: the import path (PYTHONPATH) is the one
setting that every process that sdflow starts inherits already. There is no promise to users: what a family has to offer changes
from release to release."""


@cache
def family_folders() -> tuple[Path, ...]:
    """The folders of these families, in the order of their names."""
    spec = find_spec(FAMILIES_ELSEWHERE)
    places = () if spec is None else tuple(spec.submodule_search_locations or ())
    return tuple(sorted(file.parent for place in places for file in Path(place).glob("*/family.py")))


def shipped_folders(name: str) -> tuple[Path, ...]:
    """Where a folder ("samples", "workflows") may lie: in the installed package's data, beside the package in a checkout, or in
    that of a family elsewhere."""
    package = Path(sdflow.__file__).parent
    return package / "data" / name, package.parent / name, *(folder / name for folder in family_folders())


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
