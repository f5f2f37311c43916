"""From the reference of a LoRA to its file."""

from __future__ import annotations

from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.sources.reference import LocalReference, parse_reference

USUAL_NAME = "pytorch_lora_weights.safetensors"


def find_lora(reference: str, weight_name: str | None, *, download: bool) -> Path:
    """The file of a LoRA: a file, a folder that holds one, or `hf:owner/name[@revision]`.

    weight_name: the file's name within a folder or a repository; not needed when there is just one .safetensors file,
        or one of the usual name.
    download: whether the hub may be asked; without it, only what the local hub cache holds is found.
    Raises CheckpointNotLocal for one on the hub that is not there, CheckpointError for one that cannot be found.
    """
    parsed = parse_reference(reference)
    if isinstance(parsed, LocalReference):
        return _local(parsed.path, weight_name)
    raise CheckpointError("not a LoRA", where=reference, remedy="Write a file, a folder or hf:owner/name.")


def _local(path: Path, weight_name: str | None) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError("no such file or folder", where=str(path))
    names = sorted(found.name for found in path.glob("*.safetensors"))
    chosen = weight_name or choose(names, str(path))
    if not (path / chosen).is_file():
        raise CheckpointError(f"no file {chosen}", where=str(path), remedy=f"It has: {', '.join(names) or 'none'}.")
    return path / chosen


def choose(names: list[str], where: str) -> str:
    """The one of several files to take. Raises CheckpointError when that is not clear."""
    if len(names) == 1:
        return names[0]
    if USUAL_NAME in names:
        return USUAL_NAME
    raise CheckpointError(
        f"{len(names)} .safetensors files" + (f": {', '.join(names[:8])}" if names else ""),
        where=where,
        remedy="Name one with weight_name." if names else "LoRAs are read from .safetensors files only.",
    )
