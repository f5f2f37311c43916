"""What a remote holds, and how it shrinks.

A listing may lack what was written a moment ago, and clocks differ: ages are by the store's own clock, and what nothing
refers to stays for a day. Who fetches what is removed meanwhile builds it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sdflow.store.records import BadRecord, Stored
from sdflow.store.remote.entry import (
    LIST,
    MOST_OF_ENTRY,
    MOST_OF_MANIFEST,
    RemoteObject,
    object_path,
    read_entry,
    read_object,
)
from sdflow.store.remote.parallel import Lines
from sdflow.store.remote.share import UNFINISHED, Absent, Found, Share
from sdflow.store.remote.trust import FOLDER as CLAIMS
from sdflow.store.remote.trust import SIGNATURES, signature_path
from sdflow.store.remote.trust import named as claimed

GRACE = 24 * 3600.0
"""Seconds for which a manifest and a piece stay that nothing refers to: an action that does may be on its way."""
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})(\.json|\.sig)?")


@dataclass(frozen=True)
class Listed:
    """A finished action of the remote. bytes: of its object; None when its manifest is gone or wrong. pushed: by the store's
    clock, seconds since 1970."""

    entry: Stored
    bytes: int | None
    pushed: float | None


@dataclass(frozen=True)
class Swept:
    """What went from a remote: actions, manifests and pieces; bytes freed and kept, of pieces."""

    actions: int
    manifests: int
    pieces: int
    bytes_freed: int
    bytes_kept: int


def listed(share: Share, meanwhile: Callable[[], None] = lambda: None) -> list[Listed]:
    """Every action of the remote that can be read. Raises Unusable."""
    lines = Lines(share, meanwhile)
    entries = _entries(lines, _list(lines, "actions"))
    contents = _manifests(lines, sorted({entry.object for _, entry, _ in entries}))
    return [
        Listed(entry, content.bytes if (content := contents.get(entry.object)) else None, file.changed)
        for file, entry, _ in sorted(entries, key=lambda each: each[0].path)
    ]


def sweep(
    share: Share, older_than: float, *, dry_run: bool = False, meanwhile: Callable[[], None] = lambda: None
) -> Swept:
    """Remove actions that were pushed more than `older_than` seconds ago, and what then nothing refers to.

    Actions go first, then manifests, pieces last: killed at any moment, what can be seen is whole. Raises Unusable.
    """
    lines = Lines(share, meanwhile)
    by_store = None if dry_run else _now(lines)
    # Pieces before what refers to them: whatever is pushed from now on is not among them.
    folders = [lines.listed(folder) for folder in ("pieces", "objects", SIGNATURES, "actions")]
    pieces, manifests, signatures, actions = ([file for file in files if _in_place(file)] for files in folders)
    left = [file for files in folders for file in files if file.path.endswith(UNFINISHED)]
    # Who only looks writes nothing: then it is at least as late as the last change that the store tells.
    now = (
        max(time.time(), *(file.changed or 0.0 for files in folders for file in files), 0.0)
        if by_store is None
        else by_store
    )

    def older(file: Found, seconds: float) -> bool:
        return file.changed is not None and now - file.changed > seconds

    def remove(files: list[Found]) -> None:
        if not dry_run:
            lines.for_each(files, lambda file: share.remove(file.path))

    old = [file for file in actions if older(file, older_than)]
    gone = {file.path for file in old}
    kept_actions = [file for file in actions if file.path not in gone]
    kept_entries = _entries(lines, kept_actions)
    named = {entry.object for _, entry, _ in kept_entries}
    loose = [file for file in manifests if _digest(file) not in named and older(file, min(GRACE, older_than))]
    lost = {file.path for file in loose}
    kept = _manifests(lines, [_digest(file) for file in manifests if file.path not in lost])
    used = {sha256 for content in kept.values() for sha256 in content.pieces}
    unused = [file for file in pieces if _digest(file) not in used and older(file, min(GRACE, older_than))]
    signed = {path for _, _, path in kept_entries} | _signature_of_list(lines)
    left += [file for file in signatures if file.path not in signed]
    left += [file for file in lines.listed(CLAIMS) if (digest := claimed(file)) is not None and digest not in kept]
    for files in (old, loose, unused, [file for file in left if older(file, min(GRACE, older_than))]):
        remove(files)
    if not dry_run:
        known, gone_pieces = {file.path for file in actions} - gone, {_digest(file) for file in unused}
        new = [file for file in _list(lines, "actions") if file.path not in known]
        come = [(file, entry.object) for file, entry, _ in _entries(lines, new)]
        whole = _manifests(lines, sorted({digest for _, digest in come}))
        # Pushed meanwhile, on what was there still: whoever pushed it would take it for whole from now on.
        remove([file for file, digest in come if digest not in whole or gone_pieces & whole[digest].pieces.keys()])
    freed = sum(file.size for file in unused)
    return Swept(len(old), len(loose), len(unused), freed, sum(file.size for file in pieces) - freed)


def _list(lines: Lines, folder: str) -> list[Found]:
    """The files of a folder that have a place in it."""
    return [file for file in lines.listed(folder) if _in_place(file)]


def _in_place(file: Found) -> bool:
    return _NAME.fullmatch(file.path.partition("/")[2]) is not None


def _digest(file: Found) -> str:
    return file.path.rpartition("/")[2].removesuffix(".json")


def _entries(lines: Lines, files: list[Found]) -> list[tuple[Found, Stored, str]]:
    """Those of these actions that can be read, and where the signature of each lies."""

    def read(file: Found) -> tuple[Found, Stored, str] | None:
        with suppress(Absent, BadRecord):
            data = lines.share.read(file.path, MOST_OF_ENTRY)
            return file, read_entry(data, _digest(file)), signature_path(data)
        return None

    return lines.found(files, read)


def _signature_of_list(lines: Lines) -> set[str]:
    with suppress(Absent, BadRecord):
        return {signature_path(lines.one(lambda: lines.share.read(LIST, MOST_OF_MANIFEST)))}
    return set()


def _manifests(lines: Lines, digests: list[str]) -> dict[str, RemoteObject]:
    def read(digest: str) -> tuple[str, RemoteObject] | None:
        with suppress(Absent, BadRecord):
            return digest, read_object(lines.share.read(object_path(digest), MOST_OF_MANIFEST), digest)
        return None

    return dict(lines.found(digests, read))


def _now(lines: Lines) -> float:
    """What time it is by the store's clock: that of a file written just now."""
    path, share = f"probe/{os.urandom(8).hex()}", lines.share

    def ask() -> float | None:
        share.write(path, b"probe")
        try:
            return share.changed(path)
        finally:
            share.remove(path)

    now = lines.one(ask)
    return time.time() if now is None else now
