"""A folder of textual inversion files, as users of A1111's webui have it: each file's name is the word for prompts."""

from __future__ import annotations

from pathlib import Path

from sdflow.errors import UsageError

SUFFIXES = (".pt", ".bin", ".safetensors")
"""The last counts where a name has several: it needs no pickle."""


def embeddings_in(folder: Path) -> dict[str, Path]:
    """The files of a folder and those within, by word. Raises UsageError for what is no folder, and for two files of one word,
    where small letters and capitals are the same."""
    if not folder.is_dir():
        raise UsageError("this is not a folder", where=str(folder), remedy="Name a folder of textual inversion files.")
    found: dict[str, Path] = {}
    for suffix in SUFFIXES:
        words: dict[str, Path] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() != suffix or not path.is_file():
                continue
            if (other := words.setdefault(path.stem.lower(), path)) is not path:
                raise UsageError(
                    f"its word {path.stem!r} stands for {other} already",
                    where=str(path),
                    remedy="Rename one of them.",
                )
        found |= words
    return {path.stem: path for path in found.values()}
