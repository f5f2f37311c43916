"""Companions of a checkpoint's submodels: tokenizers, the scheduler's config, the feature extractor's.

Only files that these libraries write are read and copied, and none through a link to outside the checkpoint: links in
an untrusted folder may point anywhere.
"""

from __future__ import annotations

from pathlib import Path

from sdflow.disk.input_file import TEXT_LIMIT, is_regular
from sdflow.errors import CheckpointError

KNOWN = frozenset({
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.json",
    "scheduler_config.json",
    "preprocessor_config.json",
})  # fmt: skip
"""Files written by `save_pretrained` of tokenizers, diffusers' schedulers and CLIP's image processor."""


def companion_files(folder: Path) -> tuple[str, ...]:
    """The names of the known files in a companion's folder, sorted."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.name in KNOWN and is_regular(path)))


def require_inside(folder: Path, checkpoint: Path) -> None:
    """Raises CheckpointError if a known file of a companion's folder is outside the checkpoint's.

    The hub's cache uses links: `snapshots/COMMIT/FILE` points into `blobs/`.
    """
    inside = checkpoint.resolve()
    blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside
    for name in companion_files(folder):
        found = (folder / name).resolve()
        if not (found.is_relative_to(inside) or found.is_relative_to(blobs)):
            raise CheckpointError(
                "a link to a file outside the checkpoint; such links are not followed",
                where=str(folder / name),
                remedy="Put the file itself there.",
            )


def require_small(folder: Path) -> None:
    """Raises CheckpointError for an implausibly large file, which a library would read whole."""
    for name in companion_files(folder):
        if (folder / name).stat().st_size > TEXT_LIMIT:
            raise CheckpointError(
                f"larger than {TEXT_LIMIT >> 20} MB", where=str(folder / name), remedy="Download the file again."
            )
