"""A component published as two files, one per half: TAESD's encoder and decoder, in the original names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.models.base import Shapes
from sdflow.sources.recognition import half_of


def files_of_halves(path: Path, halves: Mapping[str, Shapes], shapes_of: Callable[[Path], Shapes]) -> dict[str, Path]:
    """Half -> its file. path: one of them. Raises CheckpointError if the other is missing or something else."""
    own = half_of(shapes_of(path), halves)
    assert own is not None, "the file of a half"
    return {half: path if half == own else _other(path, own, half, halves, shapes_of) for half in halves}


def _other(path: Path, own: str, half: str, halves: Mapping[str, Shapes], shapes_of: Callable[[Path], Shapes]) -> Path:
    before, found, after = path.name.rpartition(own)
    if not found:
        raise CheckpointError(
            f"it holds only the {own}, and the {half}'s file name cannot be derived from its name",
            where=str(path),
            remedy=f"Name the two files NAME_{own}{path.suffix} and NAME_{half}{path.suffix}, in one folder.",
        )
    other = path.with_name(f"{before}{half}{after}")
    if not other.is_file():
        raise CheckpointError(
            f"it holds only the {own}, and {other.name} is not next to it",
            where=str(path),
            remedy=f"Download {other.name} into the same folder, or use the whole model with diffusers' names.",
        )
    if half_of(shapes_of(other), halves) != half:
        raise CheckpointError(
            f"it is not the {half} that belongs to {path.name}", where=str(other), remedy="Download both again."
        )
    return other


def begins_of(halves: Iterable[str]) -> list[str]:
    """Prefixes of each half's names in `Model.original_names`, which its file lacks."""
    return [f"{half}." for half in halves]
