"""Pipeline folders as the assembly makes them, but for graphs: what lies beside those is all that is held to the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.verify.as_json import as_json, from_json
from sdflow.verify.folder import FolderRequest, source_of
from tests.support.converted import artifact_of

WRITTEN_BY = ("_diffusers_version", "_name_or_path", "transformers_version")


def opened(reference: str, said: Mapping[str, Any] | None = None, **more: Any) -> Checkpoint:
    checkpoint = open_checkpoint(reference, digests=PlainDigests(), download=False, **more)
    return replace(checkpoint, said=said or {})


def described_folder(checkpoint: Checkpoint, place: Path, left_out: Collection[str] = ()) -> Path:
    """The folder of a checkpoint's pipeline; each submodel has its config.json and an empty graph."""
    parts: dict[str, Artifact] = {}
    for name, submodel in checkpoint.submodels.items():
        if name not in left_out:
            (place / "artifacts" / name).mkdir(parents=True)
            config = {key: value for key, value in submodel.load["config"].items() if key not in WRITTEN_BY}
            (place / "artifacts" / name / "config.json").write_text(json.dumps(config))
            (place / "artifacts" / name / "model.onnx").write_bytes(b"")
            parts[name] = artifact_of(place / "artifacts" / name)
    assemble(
        place / "pipeline",
        parts=parts,
        companions=checkpoint.companions,
        origin=Origin("tiny", "cpu", family=checkpoint.family.name, left_out=tuple(left_out)),
        options=checkpoint.options,
        changed=checkpoint.changed_companions(),
        copy=True,
    )
    return place / "pipeline"


def request_for(folder: Path, checkpoint: Checkpoint, *, whole: bool = True) -> FolderRequest:
    """As it reaches the process that verifies."""
    request = FolderRequest(folder, source_of(checkpoint), whole)
    return from_json(FolderRequest, json.loads(json.dumps(as_json(request))))
