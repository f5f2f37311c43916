"""Uploads a finished action: missing pieces, the manifest, and last the action file, which commits it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from sdflow import stop
from sdflow.artifact import Record
from sdflow.store.layout import log
from sdflow.store.records import Stored, dump_action
from sdflow.store.remote import entry as form
from sdflow.store.remote.reading import TooLong
from sdflow.store.remote.share import Absent, Lines, Share
from sdflow.store.remote.trust import MOST_OF_SIGNATURE, is_signed, signature_path
from sdflow.store.signing import Signer

FROM = "from"  # in `built`: the remote an artifact was fetched from; never uploaded, and never signed here


class DamagedHere(Exception):
    """A file of the local cache differs from what was published, and is not uploaded."""


@dataclass(frozen=True)
class Sent:
    results: int = 0  # new in the remote
    bytes: int = 0  # uploaded
    there: int = 0  # bytes that the remote already had

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.results + other.results, self.bytes + other.bytes, self.there + other.there)


def send(
    record: Record,
    lines: Lines,
    cuts: form.Cuts,
    *,
    mend: bool = False,
    rewrite: bool = False,
    signer: Signer | None = None,
    trust: Sequence[str] = (),
) -> Sent:
    """Push a finished action unless the remote has it (with a signer: has it signed). mend: push it anyway. rewrite:
    upload every piece even if the remote has it. Raises Unusable, DamagedHere, OSError."""
    share, artifact, committed = lines.share, record.artifact, form.action_path(record.action.digest)
    if FROM in record.built:  # a signature vouches for the builder
        signer = None
    if signer is not None and (there := lines.one(lambda: _there(share, committed))) is not None:
        mend = mend or there[1] is None

    def is_there() -> bool:
        return not mend and lines.one(lambda: share.stat(committed)) is not None

    if is_there():
        return Sent()
    content, where = _cut(record, cuts, lines.meanwhile)

    def send_piece(piece: form.Piece) -> Sent:
        if not rewrite and (found := share.stat(piece.path)) and found.size == piece.size:
            return Sent(there=piece.size)
        path, offset = where[piece]
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(piece.size)
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise DamagedHere(f"{path} changed while it was read")
        share.write(piece.path, data)
        return Sent(bytes=piece.size)

    sent = sum(lines.found(where, send_piece), Sent())
    manifest = form.dump_object(artifact.digest, content)
    if len(manifest) > form.MOST_OF_MANIFEST:
        raise DamagedHere(f"{artifact.path} has a manifest of {len(manifest):,} bytes, more than is ever read")
    lines.one(lambda: share.write(form.object_path(artifact.digest), manifest))
    if is_there():  # another machine pushed first: keep its result
        return sent + Sent(results=1)
    built = {key: value for key, value in record.built.items() if key != FROM}
    data = dump_action(Stored(record.action, artifact.digest, record.facts, built, time.time()))
    signature = None if signer is None else signer.signature(data)
    # Never replace a signed entry by an unsigned one, nor one by a trusted signer by another's.
    there = lines.one(lambda: _there(share, committed)) if mend else None
    if there and any(is_signed(*there, keys) and not is_signed(data, signature, keys) for keys in (trust, ())):
        return sent
    if signature is not None:
        lines.one(lambda: share.write(signature_path(data), signature))
    lines.one(lambda: share.write(committed, data))
    return sent + Sent(results=1)


def _cut(
    record: Record, cuts: form.Cuts, meanwhile: Callable[[], None]
) -> tuple[form.RemoteObject, dict[form.Piece, tuple[Path, int]]]:
    """Return an object's manifest, and the file and offset of each piece. Raises DamagedHere, OSError."""
    cut_at = cuts(record.artifact.path)
    files = []
    where: dict[form.Piece, tuple[Path, int]] = {}
    for entry in record.artifact.files:
        meanwhile()
        path = record.artifact.path / entry.path
        try:
            pieces, sha256 = form.cut(path, entry.size, cut_at.get(entry.path, ()))
        except EOFError as error:
            raise DamagedHere(str(error)) from error
        if sha256 != entry.sha256:
            raise DamagedHere(f"the content of {path} is not what was published")
        files.append((entry, pieces))
        for piece, offset in form.placed(pieces):
            where.setdefault(piece, (path, offset))
    return form.RemoteObject(tuple(files)), where


def _there(share: Share, path: str) -> tuple[bytes, bytes | None] | None:
    """Return the remote's action file and its signature (None: unsigned); None if missing."""
    with suppress(Absent, TooLong):
        data = share.read(path, form.MOST_OF_ENTRY)
        with suppress(Absent, TooLong):
            return data, share.read(signature_path(data), MOST_OF_SIGNATURE)
        return data, None
    return None


class Offered:
    """Pushes results in a background thread. shut: whether pushing was given up. failed: gets exceptions of `push`."""

    def __init__(
        self,
        push: Callable[[Record, Callable[[], None]], Sent | None],
        shut: Callable[[], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self.abandoned = threading.Event()
        self._push, self._shut, self._failed = push, shut, failed
        self._records: SimpleQueue[Record] = SimpleQueue()
        self._seen: set[str] = set()
        self._sent, self._waiting = Sent(), 0
        self._idle = threading.Condition()
        self._pusher: threading.Thread | None = None

    def offer(self, record: Record) -> None:
        with self._idle:
            if record.action.digest in self._seen:
                return
            self._seen.add(record.action.digest)
            self._waiting += 1
            self._records.put(record)
            if self._pusher is None:
                self._pusher = threading.Thread(target=self._run, name="remote cache push", daemon=True)
                self._pusher.start()

    def finish(self, meanwhile: Callable[[], None]) -> Sent:
        """Wait until all are pushed or pushing is given up. Returns the totals since the last call."""
        with self._idle:
            while self._waiting and not self._shut():
                self._idle.wait(0.1)
                meanwhile()
        sent, self._sent = self._sent, Sent()
        return sent

    def _run(self) -> None:
        while not self._shut():
            record = self._records.get()
            try:
                self._sent += self._push(record, self._go_on) or Sent()
            except (_Abandoned, stop.Stopped):  # the run reports its own end
                self._seen.discard(record.action.digest)
            except Exception as error:  # noqa: BLE001  (else this thread would end and `finish` wait forever)
                log.debug("pushing has failed", exc_info=error)
                self._failed(error)
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _go_on(self) -> None:
        if self.abandoned.is_set():
            raise _Abandoned


class _Abandoned(Exception):
    """The run ended before its results were pushed."""
