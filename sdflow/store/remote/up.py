"""Sending a finished action up: the pieces that are not there, the manifest, and last the action, which makes it count."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdflow.artifact import Record
from sdflow.digest import FileEntry
from sdflow.store.records import Stored, dump_action
from sdflow.store.remote.entry import (
    MOST_OF_ENTRY,
    MOST_OF_MANIFEST,
    Cuts,
    Piece,
    RemoteObject,
    action_path,
    cut,
    dump_object,
    object_path,
)
from sdflow.store.remote.parallel import Lines
from sdflow.store.remote.reading import TooLong
from sdflow.store.remote.share import Absent, Share
from sdflow.store.remote.trust import MOST_OF_SIGNATURE, is_signed, signature_path
from sdflow.store.signing import Signer

FROM = "from"
"""Of how an artifact was built: the remote that it came from. It stays on this machine, and what has it is not signed here."""


class DamagedHere(Exception):
    """A file of the local cache is not what was published: it is not passed on."""


@dataclass(frozen=True)
class Sent:
    """What pushing did: results that are new in the remote, bytes that went there, and bytes that it had already."""

    results: int = 0
    bytes: int = 0
    there: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.results + other.results, self.bytes + other.bytes, self.there + other.there)


def send(
    record: Record,
    share: Share,
    cuts: Cuts,
    *,
    mend: bool = False,
    rewrite: bool = False,
    signer: Signer | None = None,
    trust: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> Sent:
    """Push a finished action, unless the remote has it; with a signer, unless it has it signed. mend: even so. rewrite: every
    piece of it, whatever the remote has in its place.

    Raises Unusable, DamagedHere, OSError.
    """
    lines, committed = Lines(share, meanwhile), action_path(record.action.digest)

    def is_there() -> bool:
        return not mend and lines.one(lambda: share.size(committed)) is not None

    signs = signer is not None and FROM not in record.built  # a signature says who has built it
    mend = mend or (signs and lines.one(lambda: _is_unsigned(share, committed)))
    if is_there():
        return Sent()
    artifact = record.artifact
    cut_at = cuts(artifact.path)
    files: list[tuple[FileEntry, tuple[Piece, ...]]] = []
    where: dict[Piece, tuple[Path, int]] = {}
    for entry in artifact.files:
        meanwhile()
        path = artifact.path / entry.path
        try:
            pieces, sha256 = cut(path, entry.size, cut_at.get(entry.path, ()))
        except EOFError as error:
            raise DamagedHere(str(error)) from error
        if sha256 != entry.sha256:
            raise DamagedHere(f"{path} does not have the content that was published")
        files.append((entry, pieces))
        offset = 0
        for piece in pieces:
            where.setdefault(piece, (path, offset))
            offset += piece.size

    def send_piece(piece: Piece) -> Sent:
        if not rewrite and share.size(piece.path) == piece.size:
            return Sent(there=piece.size)
        path, offset = where[piece]
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(piece.size)
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise DamagedHere(f"{path} has changed while it was read")
        share.write(piece.path, data)
        return Sent(bytes=piece.size)

    sent: list[Sent] = []
    lines.for_each(where, send_piece, sent.append)
    manifest = dump_object(artifact.digest, RemoteObject(tuple(files)))
    if len(manifest) > MOST_OF_MANIFEST:
        raise DamagedHere(f"{artifact.path} makes a manifest of {len(manifest):,} bytes, which nobody would read")
    lines.one(lambda: share.write(object_path(artifact.digest), manifest))
    if not is_there():  # else another machine was first: the first result stands
        built = {key: value for key, value in record.built.items() if key != FROM}
        data = dump_action(Stored(record.action, artifact.digest, record.facts, built, time.time()))
        signature = signer.signature(data) if signer is not None and signs else None
        if mend and lines.one(lambda: _there(share, committed, data, signature, trust)):
            return sum(sent, Sent())
        if signature is not None:
            signed = signature
            lines.one(lambda: share.write(signature_path(data), signed))
        lines.one(lambda: share.write(committed, data))
    return sum(sent, Sent(results=1))


def _is_unsigned(share: Share, path: str) -> bool:
    """Whether an entry is there that nobody has signed in today's way."""
    try:
        return share.size(signature_path(share.read(path, MOST_OF_ENTRY))) is None
    except (Absent, TooLong):
        return False


def _there(share: Share, path: str, data: bytes, signature: bytes | None, trust: Sequence[str]) -> bool:
    """Whether an entry is there that this must not replace: it is signed, or signed by who is trusted, and this is not."""
    signed = None
    try:
        there = share.read(path, MOST_OF_ENTRY)
        with suppress(Absent, TooLong):
            signed = share.read(signature_path(there), MOST_OF_SIGNATURE)
    except (Absent, TooLong):
        return False
    return any(is_signed(there, signed, keys) and not is_signed(data, signature, keys) for keys in (trust, ()))
