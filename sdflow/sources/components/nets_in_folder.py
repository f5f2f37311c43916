"""The ControlNets that lie in a pipeline's folder, as diffusers saves its ControlNet pipelines: `controlnet`, and of several also
`controlnet_1`, `controlnet_2`, ..."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import family_of_index
from sdflow.sources.weight_files import read_config

_SEVERAL = "Multi"
"""How the class of several begins, in model_index.json."""


def has_nets(index: Mapping[str, Any]) -> bool:
    """Whether a pipeline with this model_index.json has ControlNets."""
    family = family_of_index(index)
    named = None if family is None or family.net is None else index.get(family.net.component)
    return isinstance(named, list) and bool(named) and isinstance(named[-1], str)


def nets_in_folder(model: str) -> dict[str, str]:
    """Name -> where each lies; none for a model that is no local folder, or that has none.

    A damaged folder is told when it is opened.
    """
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        return {}
    try:
        index = read_config(folder / "model_index.json")
    except CheckpointError:
        return {}
    family = family_of_index(index)
    if family is None or family.net is None or not has_nets(index):
        return {}
    own = family.net.component
    names = [own]
    while index[own][-1].startswith(_SEVERAL) and (folder / f"{own}_{len(names)}").is_dir():
        names.append(f"{own}_{len(names)}")
    return {name: str(folder / name) for name in names}
