"""What lies beside the submodels of a checkpoint: tokenizers, the scheduler's config, the feature extractor's.

Only files that these libraries write are read and copied, and none that a link fetches from outside the checkpoint: a
folder from a stranger may point anywhere.
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
"""Files that `save_pretrained` of tokenizers, of diffusers' schedulers and of CLIP's image processor writes."""


def companion_files(folder: Path) -> tuple[str, ...]:
    """The names of the known files in a companion's folder, sorted."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.name in KNOWN and is_regular(path)))


def require_inside(folder: Path, checkpoint: Path) -> None:
    """Raises CheckpointError when a known file of a companion's folder lies outside the checkpoint's.

    The hub's cache is laid out with links: `snapshots/COMMIT/FILE` points into `blobs/`.
    """
    inside = checkpoint.resolve()
    blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside
    for name in companion_files(folder):
        found = (folder / name).resolve()
        if not (found.is_relative_to(inside) or found.is_relative_to(blobs)):
            raise CheckpointError(
                "a link to a file outside the checkpoint, which is not followed",
                where=str(folder / name),
                remedy="Put the file itself there.",
            )


def require_small(folder: Path) -> None:
    """Raises CheckpointError for a known file that is larger than any of its kind: a library would read it whole."""
    for name in companion_files(folder):
        if (folder / name).stat().st_size > TEXT_LIMIT:
            raise CheckpointError(
                f"larger than {TEXT_LIMIT >> 20} MB", where=str(folder / name), remedy="Download the file again."
            )
