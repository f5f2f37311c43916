"""Files in pieces, each named by its content, so that what two files have in common is kept and sent once.

The cuts lie where tensors begin: a LoRA changes some tensors of a model, and the others stay the same pieces. Large tensors
are cut further, small neighbours go together. The rule looks at places alone, never at content: a model and the same
model with a LoRA are cut alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sdflow import stop

MOST = 4 << 20
"""Bytes of a piece at most: what is sent again when a line breaks, and what a reader holds in memory."""
SMALL = 128 << 10
"""Tensors of fewer bytes share a piece with their neighbours,"""
TOGETHER = 1 << 20
"""up to so many bytes."""

Cuts = Callable[[Path], Mapping[str, Sequence[int]]]
"""From an artifact's folder to the offsets, in bytes, at which tensors begin in its files."""


@dataclass(frozen=True)
class Piece:
    """Bytes, and the SHA-256 of the content."""

    size: int
    sha256: str

    @property
    def path(self) -> str:
        return f"pieces/{self.sha256[:2]}/{self.sha256}"


def no_cuts(folder: Path) -> Mapping[str, Sequence[int]]:
    return {}


def sizes(size: int, cuts: Sequence[int]) -> Iterator[int]:
    """The sizes of the pieces of a file, in order."""
    begins = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    waiting = 0
    for begin, end in pairwise(begins):
        span = end - begin
        if waiting and (span >= SMALL or waiting + span > TOGETHER):
            yield waiting
            waiting = 0
        if span < SMALL:
            waiting += span
            continue
        while span > 0:
            yield min(span, MOST)
            span -= MOST
    if waiting:
        yield waiting


def cut(path: Path, size: int, cuts: Sequence[int]) -> tuple[tuple[Piece, ...], str]:
    """The pieces of a file, and the SHA-256 of the whole. Raises OSError, and EOFError when it is shorter."""
    whole = hashlib.sha256()
    pieces = []
    with path.open("rb") as stream:
        for length in sizes(size, cuts):
            stop.check()
            data = stream.read(length)
            if len(data) != length:
                raise EOFError(f"{path} is shorter than {size:,} bytes")
            whole.update(data)
            pieces.append(Piece(length, hashlib.sha256(data).hexdigest()))
    return tuple(pieces), whole.hexdigest()
