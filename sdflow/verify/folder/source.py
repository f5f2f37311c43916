"""What a pipeline folder is held to: the files of its checkpoint, as they lie there.

What a checkpoint has not, as one in a single file, comes from the files of its architecture.
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
    """Of a checkpoint. index: its model_index.json. configs: submodel -> the config.json of its component. companions: name ->
    folder. scheduler: by name, what is said to draw in place of its own. adapted: submodel -> the entries that its config.json
    has beside those, for the IP-Adapters that the workflow names: no file of the checkpoint has them."""

    family: str
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    companions: Mapping[str, str]
    scheduler: str | None
    adapted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def source_of(checkpoint: Checkpoint) -> Source:
    """Raises CheckpointError for a config.json that cannot be read."""
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
    """The config.json that lies beside a component's weights. One file with many components, or one alone, has none."""
    config: Mapping[str, Any] = load["config"]
    if "files" not in load or "prefix" in load:
        return config
    path = Path(load["files"][0]["path"]).parent / CONFIG_FILE
    try:
        return dict(read_json(path)) if is_regular(path) else config
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="Download it again.") from error
