"""The checkpoint's files that a pipeline folder is compared with, as stored there.

Files that a checkpoint lacks, such as one in a single file, come from its architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE
from sdflow.disk.input_file import is_regular, read_json
from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint


@dataclass(frozen=True)
class Source:
    """Files of a checkpoint. index: its model_index.json. configs: submodel -> the config.json of its component.
    companions: name -> folder. scheduler: name of the one that replaces its own. adapted: submodel -> further entries
    of its config.json for the workflow's IP-Adapters, which no file of the checkpoint has."""

    family: str
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    companions: Mapping[str, str]
    scheduler: str | None
    adapted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def source_of(checkpoint: Checkpoint) -> Source:
    """The files of a checkpoint. Raises CheckpointError if a config.json cannot be read."""
    return Source(
        family=checkpoint.family.name,
        index=checkpoint.index,
        configs={name: _published_config(submodel.load) for name, submodel in checkpoint.submodels.items()},
        companions={name: str(folder.absolute()) for name, folder in checkpoint.companions.items()},
        scheduler=checkpoint.said.get("scheduler"),
        adapted={
            name: {part.adapted.entry: submodel.load["config"][part.adapted.entry]}
            for name, submodel in checkpoint.submodels.items()
            if (part := checkpoint.family.part(name)).adapted is not None and submodel.load.get("adapters")
        },
    )


def _published_config(load: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json next to a component's weights. Files with several components, or a single one alone, have
    none."""
    config: Mapping[str, Any] = load["config"]
    if "files" not in load or "prefix" in load:
        return config
    path = Path(load["files"][0]["path"]).parent / CONFIG_FILE
    try:
        return dict(read_json(path)) if is_regular(path) else config
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="Download it again.") from error
