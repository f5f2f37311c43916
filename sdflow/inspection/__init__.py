"""Identify a file or folder: `inspect`. Reads headers and configurations, no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sdflow.artifact import CONFIG_FILE, INDEX_FILE
from sdflow.errors import CheckpointError, SdflowError
from sdflow.inspection.adapters import inspect_adapter
from sdflow.inspection.contents import SUFFIXES, read_contents
from sdflow.inspection.description import Description
from sdflow.inspection.folders import inspect_built, inspect_component, inspect_pipeline
from sdflow.inspection.weights import inspect_weights
from sdflow.manifest import MANIFEST_FILE
from sdflow.sources.formats import WeightsFile
from sdflow.sources.loras.lora_header import PEFT_FILE
from sdflow.sources.recognition import LORA, UNKNOWN, recognize

__all__ = ["Description", "inspect"]


def inspect(path: Path) -> list[Description]:
    """Identify a file or folder; for a folder of files, each of them.

    Raises CheckpointError or UsageError if it is missing or damaged.
    """
    if not path.is_dir():
        return [inspect_file(path)]
    if (path / MANIFEST_FILE).is_file():
        return [inspect_built(path)]
    if (path / INDEX_FILE).is_file():
        return [inspect_pipeline(path)]
    if (path / CONFIG_FILE).is_file():
        return [inspect_component(path)]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    # PEFT saves several adapters as folders.
    files = files or sorted(path.glob(f"*/{PEFT_FILE}.safetensors"))
    if not files:
        raise CheckpointError(
            f"holds neither {INDEX_FILE} nor {CONFIG_FILE} nor weight files",
            where=str(path),
            remedy=f"Name a folder in diffusers' layout, or files of {', '.join(SUFFIXES)}.",
        )
    return [_or_damaged(file) for file in files]


def _or_damaged(file: Path) -> Description:
    """Identify one of several files; an unreadable one does not hide the others."""
    try:
        return inspect_file(file)
    except SdflowError as error:
        return Description(str(file), UNKNOWN, notes=(f"{error.what}.",))


def inspect_file(path: Path) -> Description:
    """Identify a weight file. Raises CheckpointError if it is missing or damaged."""
    contents = read_contents(path)
    found = recognize(path, contents.shapes)
    described = inspect_adapter(contents) if found.kind == LORA else inspect_weights(contents, found)
    return described if contents.opened is None else _with_format(described, contents.opened)


def _with_format(described: Description, opened: WeightsFile) -> Description:
    """Add format and types unless it is plain safetensors; remove the workflow if the format is not supported."""
    if opened.format is None:
        return described
    types = ", ".join(f"{name} ({count})" for name, count in opened.types.items())
    said = {} if opened.architecture is None else {"architecture in the file": opened.architecture}
    details = {"format": opened.format, "types": types, **said, **described.details}
    if opened.refusal is None:
        return replace(described, details=details)
    notes = (f"It cannot be used: {opened.refusal.what}. {opened.refusal.remedy}",)
    return replace(described, details=details, notes=notes, workflow=None, command=None)
