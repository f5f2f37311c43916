"""Formats of actions and manifests in a remote: JSON with its own digest, checked against the request.

Files are cut into pieces named by their content, so that shared parts are stored and sent once. Cuts are at tensor
boundaries: a LoRA changes some tensors and leaves the other pieces equal. Large tensors are cut further and small
neighbors share a piece. Cuts depend on offsets alone, so a model with and without a LoRA is cut alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sdflow import stop
from sdflow.digest import FileEntry, digest_tree, inside
from sdflow.store.records import BadRecord, Stored, dump, load, load_action

MOST = 4 << 20  # bytes of a piece: resent when a connection breaks, and held in memory by readers
SMALL, TOGETHER = 128 << 10, 1 << 20  # smaller tensors share a piece with their neighbors, up to this many bytes
Cuts = Callable[[Path], Mapping[str, Sequence[int]]]  # artifact folder -> byte offsets of tensors in its files
MOST_OF_ENTRY = 2 << 20  # bytes of an action file; real ones have a few thousand
MOST_OF_MANIFEST = 8 << 20  # bytes: 100,000 pieces, which is 100 GB and more
LIST_FORMAT = 2
LIST = "structures.json"  # index written by `sdflow cache export`: actions, and JSON about them
_HEX = frozenset("0123456789abcdef")


class OtherVersion(Exception):
    """Another version of sdflow wrote it, and this one cannot use it. newer: whether that is a newer one."""

    def __init__(self, what: str, *, newer: bool) -> None:
        super().__init__(what)
        self.newer = newer


@dataclass(frozen=True)
class Piece:
    size: int
    sha256: str

    @property
    def path(self) -> str:
        return f"pieces/{self.sha256[:2]}/{self.sha256}"


@dataclass(frozen=True)
class RemoteObject:
    files: tuple[tuple[FileEntry, tuple[Piece, ...]], ...]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry, _ in self.files)

    @property
    def pieces(self) -> set[str]:
        return {piece.sha256 for _, pieces in self.files for piece in pieces}


def action_path(digest: str) -> str:
    return f"actions/{digest[:2]}/{digest}.json"


def object_path(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}.json"


def dump_list(about: Mapping[str, Any], actions: Sequence[str]) -> bytes:
    return dump({"format": LIST_FORMAT, "about": about, "actions": [*actions]})


def read_list(data: bytes) -> tuple[Mapping[str, Any], list[str]]:
    """Return the JSON about the exported actions, and their digests. Raises OtherVersion, BadRecord."""
    body = load(data)
    written = body.get("format")
    if written != LIST_FORMAT:
        newer = isinstance(written, int) and written > LIST_FORMAT
        raise OtherVersion(
            f"its list has format {written!r:.20}, and this sdflow reads format {LIST_FORMAT}", newer=newer
        )
    about, actions = body.get("about"), body.get("actions")
    if not isinstance(about, dict) or not isinstance(actions, list) or not all(map(is_digest, actions)):
        raise BadRecord("it lists no structures")
    return about, actions


def read_entry(data: bytes, digest: str) -> Stored:
    """Parse the entry of an action and check the values that reports use. Raises BadRecord."""
    stored = load_action(data)
    action, built, facts = stored.action, stored.built, stored.facts
    if action.digest != digest:
        raise BadRecord("it belongs to another action")
    try:
        sizes = [each["bytes"] for each in facts.get("dtypes", {}).values()]
        numbers = [built["seconds"], built["peak_memory"], *facts.get("operators", {}).values(), *sizes]
        plain = isinstance(built["finished"], str) and isinstance(action.content, dict) and is_digest(stored.object)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"a required field is missing or invalid ({error})") from error
    # A JSON integer may have thousands of digits.
    if not plain or not all(isinstance(each, int | float) and 0 <= each < 2**63 for each in numbers):
        raise BadRecord("its object, its facts or how it was built cannot be read")
    return stored


def require_files(files: Sequence[FileEntry], tree: str) -> None:
    """Raise BadRecord unless these are the files of the object `tree`, each once and inside its folder."""
    if digest_tree(files) != tree:
        raise BadRecord("its files belong to another object")
    if len({file.path for file in files}) < len(files) or not files:
        raise BadRecord("it names a file twice, or no file")
    for file in files:
        if not inside(file.path) or not is_digest(file.sha256) or file.size < 0:
            raise BadRecord(f"it names {file.path!r:.80}, which is outside the object")


def dump_object(tree: str, content: RemoteObject) -> bytes:
    files = [
        [entry.path, entry.size, entry.sha256, [[piece.size, piece.sha256] for piece in pieces]]
        for entry, pieces in content.files
    ]
    return dump({"format": 1, "object": tree, "files": files})


def read_object(data: bytes, tree: str) -> RemoteObject:
    """Parse a manifest. Raises BadRecord unless it is that of `tree` with all files inside the object."""
    try:
        files = tuple(
            (FileEntry(str(path), int(size), str(sha)), tuple(Piece(int(each), str(of)) for each, of in pieces))
            for path, size, sha, pieces in load(data)["files"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"it cannot be read ({error})") from error
    require_files([entry for entry, _ in files], tree)
    for entry, pieces in files:
        if not all(0 < piece.size <= MOST and is_digest(piece.sha256) for piece in pieces):
            raise BadRecord(f"a piece of {entry.path:.80} has an invalid size or digest")
        if sum(piece.size for piece in pieces) != entry.size:
            raise BadRecord(f"the pieces of {entry.path:.80} do not add up to the file")
    return RemoteObject(files)


def is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= _HEX


def placed(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    offset = 0
    for piece in pieces:
        yield piece, offset
        offset += piece.size


def no_cuts(folder: Path) -> Mapping[str, Sequence[int]]:
    return {}


def sizes(size: int, cuts: Sequence[int]) -> Iterator[int]:
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
    """Return a file's pieces and SHA-256. Raises OSError, or EOFError if the file is shorter than `size`."""
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
