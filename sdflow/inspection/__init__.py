"""What a file or folder is: `inspect`. Reads headers and configurations, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdflow.artifact import INDEX_FILE
from sdflow.errors import CheckpointError, SdflowError
from sdflow.families import ARCHITECTURES, family_of_architecture
from sdflow.inspection.adapters import details_from_metadata, inspect_adapter, is_adapter
from sdflow.inspection.contents import SUFFIXES, Contents, read_contents
from sdflow.inspection.description import EMBEDDING, UNKNOWN, Description
from sdflow.inspection.folders import CONFIG_FILE, inspect_built, inspect_component, inspect_pipeline
from sdflow.inspection.lines import titles_of
from sdflow.inspection.weights import inspect_weights
from sdflow.manifest import MANIFEST_FILE
from sdflow.sources.architectures import architecture_config
from sdflow.sources.embedding import MOST_VECTORS, ONLY, embedding_names
from sdflow.sources.loras.lora_header import PEFT_FILE

__all__ = ["Description", "inspect"]


def inspect(path: Path) -> list[Description]:
    """What a file or folder is; of a folder of files, what each of them is.

    Raises CheckpointError and UsageError for what is missing or damaged.
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
    # Of several adapters PEFT makes folders.
    files = files or sorted(path.glob(f"*/{PEFT_FILE}.safetensors"))
    if not files:
        raise CheckpointError(
            f"holds neither {INDEX_FILE} nor {CONFIG_FILE}, and no file of weights",
            where=str(path),
            remedy=f"Name a folder in diffusers' layout, or files of {', '.join(SUFFIXES)}.",
        )
    return [_or_damaged(file) for file in files]


def _or_damaged(file: Path) -> Description:
    """One of several: that it cannot be read hides none of the others."""
    try:
        return inspect_file(file)
    except SdflowError as error:
        return Description(str(file), UNKNOWN, notes=(f"{error.what}.",))


def inspect_file(path: Path) -> Description:
    """What a file of weights is. Raises CheckpointError for what is missing or damaged."""
    contents = read_contents(path)
    if is_adapter(contents):
        return inspect_adapter(contents)
    if (widths := _vectors(contents)) is not None:
        return _embedding(contents, widths)
    return inspect_weights(contents)


def _vectors(contents: Contents) -> dict[str, tuple[int, int]] | None:
    """How many vectors of which width there are, by name, in a file of textual inversion; None for any other."""
    shapes = {name: (1, *shape) if len(shape) == 1 else shape for name, shape in contents.shapes.items()}
    if len(shapes) != 1 and shapes.keys() != set(embedding_names()):
        return None
    if any(len(shape) != 2 or not 0 < shape[0] <= MOST_VECTORS or shape[1] < 2 for shape in shapes.values()):
        return None
    # A tensor of any other name may be anything, unless a text encoder reads vectors of its width.
    if shapes.keys().isdisjoint((ONLY, *embedding_names())) and not _reading([shape[1] for shape in shapes.values()]):
        return None
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def _reading(widths: Sequence[int]) -> list[str]:
    """The shipped architectures whose text encoders read vectors of these widths."""
    found = []
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        configs = [architecture_config(architecture, family.part(name).component) for name in family.text]
        own = [config["hidden_size"] for config in configs if "hidden_size" in config]
        # A model with another reader than CLIP takes no learned words.
        if len(own) == len(configs) and sorted(own) == sorted(widths):
            found.append(architecture)
    return found


def _embedding(contents: Contents, widths: dict[str, tuple[int, int]]) -> Description:
    fitting = _reading([width for _, width in widths.values()])
    vectors = {count for count, _ in widths.values()}
    option = f"--embedding {contents.path}" + (" --allow-pickle" if contents.pickled else "")
    return Description(
        str(contents.path),
        EMBEDDING,
        titles_of(fitting),
        None,
        contents.precision,
        (),
        {
            "vectors": max(vectors),
            "width": " and ".join(str(width) for _, width in widths.values()),
            **details_from_metadata(contents.metadata),
        },
        () if fitting else ("No model that sdflow knows reads vectors of this width.",),
        None,
        f'sdflow generate PIPELINE {option} --prompt "... {contents.path.stem} ..."' if fitting else None,
    )
