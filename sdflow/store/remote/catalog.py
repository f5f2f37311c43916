"""Lists and shrinks a remote.

Listings may lack recent writes and clocks differ, so ages follow the store's clock and unreferenced files stay for a
day. A client that fetches an entry while it is removed builds the step instead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from sdflow.store.records import BadRecord, Stored
from sdflow.store.remote import entry as form
from sdflow.store.remote import trust
from sdflow.store.remote.share import UNFINISHED, Absent, Found, Lines, Share

GRACE = 24 * 3600.0  # seconds that unreferenced files stay: the action that refers to them may still be uploading
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})(\.json|\.sig)?")


@dataclass(frozen=True)
class Listed:
    entry: Stored
    bytes: int | None  # of its object; None if the manifest is missing or wrong
    pushed: float | None  # Unix time by the store's clock


@dataclass(frozen=True)
class Swept:
    actions: int
    manifests: int
    pieces: int
    bytes_freed: int  # of pieces
    bytes_kept: int


@dataclass(frozen=True)
class _Entry:
    file: Found
    stored: Stored
    signature: str  # path


def listed(share: Share, meanwhile: Callable[[], None] = lambda: None) -> list[Listed]:
    lines = Lines(share, meanwhile)
    entries = sorted(_entries(lines, _in_place(lines.listed("actions"))), key=lambda each: each.file.path)
    sizes = {digest: of.bytes for digest, of in _manifests(lines, {each.stored.object for each in entries}).items()}
    return [Listed(each.stored, sizes.get(each.stored.object), each.file.changed) for each in entries]


def sweep(
    share: Share, older_than: float, *, dry_run: bool = False, meanwhile: Callable[[], None] = lambda: None
) -> Swept:
    """Remove actions pushed more than `older_than` seconds ago, then unreferenced files. Actions go first, pieces last,
    so a killed sweep leaves visible entries complete. Raises Unusable."""
    lines = Lines(share, meanwhile)
    by_store = None if dry_run else _now(lines)
    # List pieces before what refers to them: later uploads are then not among the candidates.
    folders = [lines.listed(folder) for folder in ("pieces", "objects", trust.SIGNATURES, "actions")]
    files = [file for folder in folders for file in folder]
    pieces, manifests, signatures, actions = map(_in_place, folders)
    # A dry run writes no probe: the store's time is at least that of its last change.
    now = max(time.time(), *(file.changed or 0.0 for file in files), 0.0) if by_store is None else by_store

    def older(file: Found, seconds: float = min(GRACE, older_than)) -> bool:
        return file.changed is not None and now - file.changed > seconds

    def remove(files: list[Found]) -> None:
        if not dry_run:
            lines.for_each(files, lambda file: share.remove(file.path))

    old = [file for file in actions if older(file, older_than)]
    kept_actions = [file for file in actions if not older(file, older_than)]
    kept_entries = _entries(lines, kept_actions)
    named = {each.stored.object for each in kept_entries}
    loose = [file for file in manifests if _digest(file) not in named and older(file)]
    kept = _manifests(lines, {_digest(file) for file in manifests} - {_digest(file) for file in loose})
    used = {sha256 for content in kept.values() for sha256 in content.pieces}
    unused = [file for file in pieces if _digest(file) not in used and older(file)]
    signed = {each.signature for each in kept_entries}
    with suppress(Absent, BadRecord):
        signed.add(trust.signature_path(lines.one(lambda: share.read(form.LIST, form.MOST_OF_MANIFEST))))
    left = [file for file in files if file.path.endswith(UNFINISHED)]
    left += [file for file in signatures if file.path not in signed]
    left += [file for file in lines.listed(trust.FOLDER) if (of := trust.named(file)) is not None and of not in kept]
    for doomed in (old, loose, unused, [file for file in left if older(file)]):
        remove(doomed)
    if not dry_run:
        known, gone = {file.path for file in kept_actions}, {_digest(file) for file in unused}
        come = _entries(lines, [file for file in _in_place(lines.listed("actions")) if file.path not in known])
        whole = _manifests(lines, {each.stored.object for each in come})
        # Actions pushed meanwhile that reuse removed pieces must go, or their pushers would take them for complete.
        objects = {digest for digest, content in whole.items() if not gone & content.pieces}
        remove([each.file for each in come if each.stored.object not in objects])
    freed = sum(file.size for file in unused)
    return Swept(len(old), len(loose), len(unused), freed, sum(file.size for file in pieces) - freed)


def _in_place(files: Iterable[Found]) -> list[Found]:
    return [file for file in files if _NAME.fullmatch(file.path.partition("/")[2])]


def _digest(file: Found) -> str:
    return file.path.rpartition("/")[2].removesuffix(".json")


def _entries(lines: Lines, files: list[Found]) -> list[_Entry]:

    def read(file: Found) -> _Entry | None:
        with suppress(Absent, BadRecord):
            data = lines.share.read(file.path, form.MOST_OF_ENTRY)
            return _Entry(file, form.read_entry(data, _digest(file)), trust.signature_path(data))
        return None

    return lines.found(files, read)


def _manifests(lines: Lines, digests: Iterable[str]) -> dict[str, form.RemoteObject]:
    def read(digest: str) -> tuple[str, form.RemoteObject] | None:
        with suppress(Absent, BadRecord):
            data = lines.share.read(form.object_path(digest), form.MOST_OF_MANIFEST)
            return digest, form.read_object(data, digest)
        return None

    return dict(lines.found(digests, read))


def _now(lines: Lines) -> float:
    """Return the time by the store's clock, from the mtime of a probe file."""
    path, share = f"probe/{os.urandom(8).hex()}", lines.share

    def ask() -> float:
        share.write(path, b"probe")
        try:
            return (found.changed if (found := share.stat(path)) else None) or time.time()
        finally:
            share.remove(path)

    return lines.one(ask)
