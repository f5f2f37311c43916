"""Files shipped with sdflow: sample checkpoints, and the data of the families' folders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import sdflow
from sdflow.disk.input_file import is_regular
from sdflow.errors import CheckpointError

_FAMILY_PACKAGES = ("sdflow.families", "sdflow_families")
"""Packages that contain families: the shipped ones, and a namespace package for others, which tests define. The import
path (PYTHONPATH) is the only setting that every process started by sdflow inherits. Not a public API: the interface of
families changes between releases."""


@cache
def _folders() -> tuple[tuple[str, Path], ...]:
    """Full names of the subpackages, with their folders, sorted by name."""
    found = []
    for package in _FAMILY_PACKAGES:
        spec = find_spec(package)
        places = () if spec is None else tuple(spec.submodule_search_locations or ())
        folders = (file.parent for place in places for file in Path(place).glob("*/__init__.py"))
        found += [(f"{package}.{folder.name}", folder) for folder in sorted(folders)]
    return tuple(found)


def family_modules() -> tuple[str, ...]:
    """The modules that each define a `FAMILY`."""
    return tuple(f"{package}.family" for package, folder in _folders() if (folder / "family.py").is_file())


def family_data(name: str) -> tuple[Path, ...]:
    """The families' folders of this name ("architectures", "workflows"), including shared ones."""
    return tuple(place for _, folder in _folders() if (place := folder / name).is_dir())


def sample_folders() -> tuple[Path, ...]:
    """Possible sample folders: next to the package in a checkout, and in the distribution sdflow-samples."""
    spec = find_spec("sdflow_samples")
    installed = () if spec is None else tuple(spec.submodule_search_locations or ())
    return Path(sdflow.__file__).parents[1] / "samples", *map(Path, installed)


def _bases() -> Iterator[tuple[str, Path]]:
    """Every shipped base workflow, named as in `extends`."""
    for folder in family_data("workflows"):
        yield from ((f"base/{path.name}", path) for path in (folder / "base").glob("*.yaml"))


def shipped_workflow(reference: str) -> Path | None:
    """A shipped workflow, named as in `base/sd15.yaml`; None if there is none."""
    return next((path for name, path in _bases() if name == reference and is_regular(path)), None)


def shipped_workflows() -> tuple[str, ...]:
    """The names of all shipped base workflows."""
    return tuple(sorted(name for name, _ in _bases()))


def sample_folder(name: str) -> Path:
    """The folder of a sample: next to the package in a checkout, or in the installed distribution sdflow-samples."""
    indexes = [index for place in sample_folders() for index in place.glob("*/model_index.json")]
    found = {index.parent.name: index.parent for index in indexes}
    if name not in found:
        raise CheckpointError(
            f"there is no sample {name!r}" if found else "needs sdflow-samples, which is not installed",
            where=f"sample:{name}",
            remedy=f"known: {', '.join(sorted(found))}" if found else "pip install 'sdflow[samples]'",
        )
    return found[name]
