"""What the remote says of an action and of an object: JSON that carries its own digest, and is held to what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import FileEntry, digest_tree, inside
from sdflow.store.records import BadRecord, dump, load, load_action
from sdflow.store.remote.pieces import MOST, Piece

MOST_OF_ENTRY = 2 << 20
"""Bytes of an action's file at most, signatures included. Those of real builds have some thousands."""
MOST_OF_MANIFEST = 8 << 20
"""Bytes of a manifest at most: 100,000 pieces, which is 100 GB and more."""
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class RemoteEntry:
    """A finished action that the remote has."""

    action: Action
    object: str
    facts: Mapping[str, Any]
    built: Mapping[str, Any]


@dataclass(frozen=True)
class RemoteObject:
    """An object's files, each with its pieces in order."""

    files: tuple[tuple[FileEntry, tuple[Piece, ...]], ...]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry, _ in self.files)

    @property
    def pieces(self) -> dict[str, Piece]:
        return {piece.sha256: piece for _, pieces in self.files for piece in pieces}


def action_path(digest: str) -> str:
    return f"actions/{digest[:2]}/{digest}.json"


def object_path(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}.json"


def read_entry(data: bytes, digest: str) -> RemoteEntry:
    """The entry of the action that was asked for. Raises BadRecord."""
    stored = load_action(data)
    if stored.action.digest != digest:
        raise BadRecord("it belongs to another action")
    built, facts = stored.built, stored.facts
    if not is_digest(stored.object):
        raise BadRecord("it names no object")
    if not isinstance(stored.action.content, dict):
        raise BadRecord("its action is no map")
    if not isinstance(facts, dict) or not isinstance(built, dict):
        raise BadRecord("its facts are no map")
    if not _are_counts(facts.get("operators", {})) or not _are_sizes(facts.get("dtypes", {})):
        raise BadRecord("its facts count nothing")
    if not all(_is_number(built.get(each)) for each in ("seconds", "peak_memory")):
        raise BadRecord("it does not say what building took")
    if not isinstance(built.get("finished"), str):
        raise BadRecord("it does not say when it was built")
    return RemoteEntry(stored.action, stored.object, facts, built)


def dump_object(tree: str, content: RemoteObject) -> bytes:
    files = [
        [entry.path, entry.size, entry.sha256, [[piece.size, piece.sha256] for piece in pieces]]
        for entry, pieces in content.files
    ]
    return dump({"format": 1, "object": tree, "files": files})


def read_object(data: bytes, tree: str) -> RemoteObject:
    """The manifest of an object. Raises BadRecord unless it is that of `tree` and keeps inside its folder."""
    body = load(data)
    try:
        files = tuple(
            (
                FileEntry(str(path), int(size), str(sha256)),
                tuple(Piece(int(length), str(sha)) for length, sha in pieces),
            )
            for path, size, sha256, pieces in body["files"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"it cannot be read ({error})") from error
    if digest_tree(entry for entry, _ in files) != tree:
        raise BadRecord("it belongs to another object")
    paths = [entry.path for entry, _ in files]
    if len(set(paths)) < len(paths) or not paths:
        raise BadRecord("it names a file twice, or none")
    for entry, pieces in files:
        if not inside(entry.path):
            raise BadRecord(f"it names {entry.path!r:.80}, which is outside the object")
        if not all(0 < piece.size <= MOST and is_digest(piece.sha256) for piece in pieces):
            raise BadRecord(f"the pieces of {entry.path:.80} are none")
        if sum(piece.size for piece in pieces) != entry.size:
            raise BadRecord(f"the pieces of {entry.path:.80} do not make up the file")
    return RemoteObject(files)


def _is_number(value: Any) -> bool:
    """Whether it can be reckoned with: an integer of JSON may have thousands of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(each) for each in value.values())


def _are_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict) and _is_number(each.get("bytes")) for each in value.values()
    )


def is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= _HEX
