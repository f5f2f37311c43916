"""`sdflow generate --from IMAGE`: the settings of an image, where the command line says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from sdflow.errors import UsageError
from sdflow.families.image_text_reading import ImageSettings, read_image_settings
from sdflow.parameter import Parameter

ANY_OF: Mapping[str, tuple[str, ...]] = {"embeddings": ("embeddings", "embedding_folder")}
"""The options that give an input, where it is not the one of its name."""


def with_settings_of(
    path: Path, context: typer.Context, options: Mapping[str, Parameter], given: Mapping[str, Any], prompts: list[str]
) -> tuple[list[str], dict[str, Any], tuple[str, ...]]:
    """The prompts and the values of options, with the image's where the command line has none; and what cannot be taken over.

    Raises UsageError for an image that was drawn from files which are not named again.
    """
    found = read_image_settings(path)
    said = {name for name in context.params if _is_said(context, name)}
    _require_inputs(path, found, said, options)
    taken = {name: value for name, value in found.settings.items() if name in given and name not in said}
    notes = tuple(f"{path.name}, written by {found.program}: {note}" for note in found.notes)
    return prompts or [found.prompt], {**given, **taken}, notes


def _is_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _require_inputs(path: Path, found: ImageSettings, said: set[str], options: Mapping[str, Parameter]) -> None:
    missing = [each for each in found.inputs if said.isdisjoint(ANY_OF.get(each, (each,)))]
    if missing:
        spelled = ", ".join(f"{options[each].option(each)} {options[each].metavar}" for each in missing)
        raise UsageError(
            f"the image was also drawn from: {', '.join(each.replace('_', ' ') for each in missing)}",
            where=f"--from {path}",
            remedy=f"Name the files again: {spelled}.",
        )
