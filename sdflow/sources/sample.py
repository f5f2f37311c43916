"""Checkpoints that come with sdflow: `sample:shapes` is the folder `samples/shapes`."""

from __future__ import annotations

from pathlib import Path

from sdflow.disk.shipped import sample_folders
from sdflow.errors import CheckpointError


def sample_folder(name: str) -> Path:
    """The folder of a sample: in the installed package's data, or beside the package in a checkout."""
    folders = [folder / name for folder in sample_folders()]
    for folder in folders:
        if (folder / "model_index.json").is_file():
            return folder
    raise CheckpointError(
        f"no sample of the name {name!r} is installed",
        where=f"sample:{name}",
        remedy=f"Looked in {' and '.join(str(folder) for folder in folders)}. Use a checkout of the repository.",
    )
