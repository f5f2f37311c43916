"""Checkpoints that come with sdflow: `sample:shapes` is the folder `samples/shapes`."""

from __future__ import annotations

from pathlib import Path

from sdflow.disk.shipped import sample_folders
from sdflow.errors import CheckpointError
from sdflow.machine.packages import how_to_install

_DISTRIBUTION = "sdflow-samples"
_INDEX = "model_index.json"


def sample_folder(name: str) -> Path:
    """The folder of a sample: beside the package in a checkout, or in the installed distribution sdflow-samples."""
    found = {index.parent.name: index.parent for place in sample_folders() for index in place.glob(f"*/{_INDEX}")}
    if name not in found:
        raise CheckpointError(
            f"there is no sample {name!r}" if found else f"needs {_DISTRIBUTION}, which is not installed",
            where=f"sample:{name}",
            remedy=f"known: {', '.join(sorted(found))}" if found else how_to_install(_DISTRIBUTION),
        )
    return found[name]
