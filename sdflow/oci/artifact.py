"""A pipeline as a ModelPack artifact: manifest, configuration, and one layer per file.

See https://github.com/modelpack/model-spec. Layers are the raw files, so pipelines share the blobs of equal files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from sdflow.artifact import INDEX_FILE
from sdflow.digest import inside
from sdflow.disk.input_file import parse_json
from sdflow.errors import VerificationError, first_problem
from sdflow.manifest import MANIFEST_FILE, Manifest
from sdflow.oci.registry import MANIFEST_TYPE

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
LAYER_TYPE = "application/vnd.cncf.model.{}.v1.raw"
FILE = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"  # ORAS reads file names from it
_KINDS = {
    "weight": (".onnx", ".data", ".safetensors", ".bin"),
    "doc": (".md", ".txt", ".sig", ".bundle", "LICENSE", "provenance.json"),
}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MOST_FILES = 10_000
MOST_BYTES = 1 << 44

FOREIGN = "It was not pushed by `sdflow push`, or has changed since."


class Descriptor(BaseModel):
    """Type, digest and size of a blob."""

    media_type: str = Field(alias="mediaType")
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, le=MOST_BYTES, strict=True)]
    annotations: dict[str, str] = {}


class _Manifest(BaseModel):
    schema_version: Annotated[int, Field(alias="schemaVersion", ge=2, le=2)]
    artifact_type: str = Field(alias="artifactType")
    layers: Annotated[list[Descriptor], Field(max_length=MOST_FILES)]


def manifest_of(pipeline: Manifest, layers: Mapping[str, tuple[str, int]]) -> tuple[bytes, bytes]:
    """Return the manifest and configuration of a pipeline, deterministically. layers: file -> SHA-256 and size."""
    precisions = {each.precision for each in pipeline.origin.chains.values() if each.precision}
    quantized = {*pipeline.origin.quantized.values()}
    config = {
        "descriptor": {"name": pipeline.origin.name, "family": pipeline.origin.family},
        "config": {
            "format": "onnx",
            **({"precision": _one({_PRECISIONS[each] for each in precisions})} if precisions else {}),
            **({"quantization": _one(quantized)} if quantized else {}),
            "capabilities": {"inputTypes": ["text"], "outputTypes": ["image"]},
        },
        "modelfs": {"type": "layers", "diffIds": [f"sha256:{digest}" for digest, _ in layers.values()]},
    }
    written = _bytes(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": f"sha256:{sha256(written).hexdigest()}", "size": len(written)},
        "layers": [
            {
                "mediaType": LAYER_TYPE.format(_kind(name)),
                "digest": f"sha256:{digest}",
                "size": size,
                "annotations": {FILE: name, TITLE: name},
            }
            for name, (digest, size) in layers.items()
        ],
    }
    return _bytes(manifest), written


def files_of(content: bytes, where: str) -> dict[str, Descriptor]:
    """Return file -> layer of an untrusted manifest. Raises VerificationError if it is not a pipeline's."""
    try:
        manifest = _Manifest.model_validate(parse_json(content))
    except ValidationError as error:
        raise VerificationError(
            f"is not a model manifest: {first_problem(error)}", where=where, remedy=FOREIGN
        ) from error
    except ValueError as error:
        raise VerificationError(f"is not a manifest: {error}", where=where, remedy=FOREIGN) from error
    if manifest.artifact_type != ARTIFACT_TYPE:
        raise VerificationError(
            f"is a {manifest.artifact_type:.100}, not a ModelPack model", where=where, remedy=FOREIGN
        )
    files: dict[str, Descriptor] = {}
    for layer in manifest.layers:
        name = layer.annotations.get(FILE, "")
        if not inside(name):
            raise VerificationError(
                f"a layer names {name!r:.200}, which is not a file of a pipeline", where=where, remedy=FOREIGN
            )
        if layer.media_type not in [LAYER_TYPE.format(kind) for kind in (*_KINDS, "weight.config", "code")]:
            raise VerificationError(
                f"{name:.200} has the media type {layer.media_type:.100}, which sdflow does not read",
                where=where,
                remedy=FOREIGN,
            )
        files[name] = layer
    _require_apart([layer.annotations[FILE] for layer in manifest.layers], where)
    for name in (MANIFEST_FILE, INDEX_FILE):
        if name not in files:
            raise VerificationError(f"not an sdflow pipeline: it has no {name}", where=where, remedy=FOREIGN)
    return files


def _require_apart(names: Sequence[str], where: str) -> None:
    """Raise VerificationError if two paths collide, ignoring case, or a file has the path of a folder."""
    taken = set()
    folders = {str(parent).casefold() for name in names for parent in PurePosixPath(name).parents}
    for name in names:
        if (folded := name.casefold()) in taken or folded in folders:
            raise VerificationError(f"two layers are for {name:.200}", where=where, remedy=FOREIGN)
        taken.add(folded)


def _kind(name: str) -> str:
    return next((kind for kind, endings in _KINDS.items() if name.endswith(endings)), "weight.config")


def _one(values: set[str]) -> str:
    return values.copy().pop() if len(values) == 1 else "mixed"


def _bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False).encode()
