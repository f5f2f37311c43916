"""Results of `sdflow tune` for a pipeline, stored per user, valid for the artifacts, device and versions they were made
on.

There is a file per pipeline and target, with a record per device and set of versions. It is neither in the pipeline's
folder, which may be shared between machines and is replaced as a whole, nor in the cache, which contains no timings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.digest import digest_json
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.user_folder import user_folder, writing
from sdflow.errors import UsageError
from sdflow.machine.device import device
from sdflow.machine.packages import versions
from sdflow.manifest import read_manifest
from sdflow.runtime.files.folder import every_artifact
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.targets import Target

FORMAT_VERSION = 1
FOLDER_VARIABLE = "SDFLOW_TUNING"


@dataclass(frozen=True)
class Recorded:
    """A stored result of `sdflow tune`.

    tuning: to load the pipeline with. note: for the user: its origin, or why none applies; may be empty.
    """

    tuning: Tuning
    note: str = ""


def tuning_file(folder: Path, target: Target) -> Path:
    """Return the file with this pipeline's tuning, in $SDFLOW_TUNING or the user's cache folder.

    Raises UsageError if neither exists.
    """
    artifacts = every_artifact(folder)
    return (
        user_folder("tuning", FOLDER_VARIABLE) / f"{digest_json({'artifacts': artifacts, 'target': target.name})}.json"
    )


def machine(target: Target) -> dict[str, Any]:
    """Return what a tuning is valid for: processor, cores, accelerator, versions of ONNX Runtime and sdflow."""
    found = device(target)
    relevant = {name: value for name, value in versions().items() if name.startswith(("onnxruntime", "sdflow"))}
    return {**{name: found[name] for name in ("processor", "cores", "accelerator")}, "versions": relevant}


def recorded_tuning(folder: Path, target: Target) -> Recorded:
    """Return the tuning of this pipeline on this machine, or the target's own settings if there is none.

    Raises UsageError if the file is damaged.
    """
    path = tuning_file(folder, target)
    records = _read(path)
    here = machine(target)
    for record in records:
        if record["machine"] == here:
            tuning = Tuning(**record["tuning"])
            return Recorded(tuning, f"tuned on this machine: {tuning}" if tuning != UNTUNED else "")
    if not records:
        return Recorded(UNTUNED)
    differing = ", ".join(key for key in here if here[key] != records[-1]["machine"].get(key))
    return Recorded(UNTUNED, f"not tuned: the last `sdflow tune` ran with different {differing}")


def record_tuning(folder: Path, target: Target, tuning: Tuning, evidence: Mapping[str, Any]) -> Path:
    """Store a tuning, replacing this machine's previous one. evidence: the measurements."""
    path, here = tuning_file(folder, target), machine(target)
    others = [record for record in _read(path) if record["machine"] != here]
    records = [*others, {"machine": here, "tuning": tuning.to_json(), **evidence}]
    content = {"format_version": FORMAT_VERSION, "pipeline": read_manifest(folder).origin.name, "records": records}
    with writing("choices of `sdflow tune`", path, FOLDER_VARIABLE):
        write_whole(path, json.dumps(content, indent=2).encode())
    return path


def _read(path: Path) -> Sequence[Mapping[str, Any]]:
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {content['format_version']} is not supported, only {FORMAT_VERSION}")
        records = content["records"]
        for record in records:
            Tuning(**record["tuning"])
            dict(record["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"not a file of `sdflow tune`: {error}", where=str(path), remedy="Remove it, then run `sdflow tune` again."
        ) from error
    return list(records)
