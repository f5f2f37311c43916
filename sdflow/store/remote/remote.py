"""A remote as a run uses it: its failures are reported once and end its use; the run then builds the steps itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sdflow import stop
from sdflow.artifact import Record
from sdflow.errors import UsageError
from sdflow.store.layout import Layout, free_bytes, keep_bytes, log
from sdflow.store.objects import BadTree, read_manifest
from sdflow.store.records import BadRecord, Stored
from sdflow.store.remote import entry as form
from sdflow.store.remote.down import WrongBytes, bring, written
from sdflow.store.remote.reading import TooLong
from sdflow.store.remote.share import Absent, Lines, Refused, Share, Unusable
from sdflow.store.remote.spec import RemoteSpec
from sdflow.store.remote.trust import MOST_OF_SIGNATURE, Claim, claim, claims, require_signed, signature_path
from sdflow.store.remote.up import DamagedHere, Offered, Sent, send
from sdflow.store.signing import Signer, Untrusted, require_signers
from sdflow.units import spell_bytes

T = TypeVar("T")

TRIES = 3
PAUSE = 0.2  # seconds before the second try, doubled for each further one
PATIENCE = 300.0  # seconds a download may take, or 20 times the object's build time if that is longer


class Remote:
    """A remote cache. Thread-safe. tell: gets user messages. Raises UsageError if signatures cannot be checked."""

    def __init__(
        self, spec: RemoteSpec, layout: Layout, cuts: form.Cuts = form.no_cuts, signer: Signer | None = None
    ) -> None:
        if spec.trust:
            require_signers(spec.trust)
        self.spec, self.share = spec, Share(spec)
        self.tell: Callable[[str], None] = log.warning
        # Reasons why the remote is no longer used, no longer read (wrong content), and no longer pushed to.
        self.unusable: str | None = None
        self.distrusted: str | None = None
        self.closed: str | None = None
        self._layout, self._cuts, self._signer = layout, cuts, signer
        self._known: dict[str, Stored] = {}
        self._mend: set[str] = set()  # actions with an incomplete or wrong entry: the next push replaces the entry
        self._wrongs: set[str] = set()  # actions with wrong content: the next push replaces every piece as well
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._offered = Offered(self.push, lambda: self._shut, self._close)

    def look(self, digest: str, meanwhile: Callable[[], None] = lambda: None) -> Stored | None:
        """Return the remote's entry of an action; None if it has none or is unusable."""
        if not self._read_from or digest in self._mend:
            return None
        if digest in self._known:
            return self._known[digest]
        try:
            path, parse = form.action_path(digest), partial(form.read_entry, digest=digest)
            entry = self._read(path, form.MOST_OF_ENTRY, parse, meanwhile, signed=True)
        except Absent as error:
            if isinstance(error, Refused):
                self._say(
                    f"{self.spec.shown} answered 403, which is treated as a missing entry. If the entry should exist, check "
                    "the permissions of these credentials."
                )
        except Unusable as error:
            self._give_up(error)
        except Untrusted:
            self._mend.add(digest)
            self._say(f"{self.spec.shown} has results without a trusted signature; they are treated as missing")
        except WrongBytes as error:
            self._wrong(digest, error)
        else:
            self._known[digest] = entry
        return self._known.get(digest)

    def exported(self, meanwhile: Callable[[], None] = lambda: None) -> tuple[Mapping[str, Any], list[Stored]]:
        """Return what `export` wrote: the JSON, and the entries. Raises Absent, WrongBytes, Unusable, Untrusted,
        OtherVersion."""
        about, digests = self._read(form.LIST, form.MOST_OF_MANIFEST, form.read_list, meanwhile, signed=True)
        found = []
        for digest in digests:
            if (entry := self.look(digest, meanwhile)) is None:
                lacks = "has no trusted signature" if self.spec.trust else "is missing"
                raise Absent(self.distrusted or self.unusable or f"the action {digest[:12]} {lacks}")
            found.append(entry)
        return about, found

    def export(self, about: Mapping[str, Any], actions: Sequence[str]) -> None:
        """Write the index of exported actions. Call it after pushing them. Raises Unusable."""
        data = form.dump_list(about, actions)
        if self._signer is not None:
            self.share.write(signature_path(data), self._signer.signature(data))
        self.share.write(form.LIST, data)

    def bring(self, entry: Stored, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Download an entry's files to `folder`, resuming an earlier attempt. Returns False, and reports why, on
        failure. The caller checks the tree digest and calls `disbelieve` if it differs."""
        if not self._read_from:
            return False
        digest, path = entry.action.digest, form.object_path(entry.object)
        try:
            parse = partial(form.read_object, tree=entry.object)
            content = self._read(path, form.MOST_OF_MANIFEST, parse, meanwhile)
            missing = content.bytes - min(content.bytes, written(folder))
            if missing > free_bytes(self._layout.root):
                self._say(f"not enough disk space for {spell_bytes(missing)} from {self.spec.shown}; building locally")
                return False
            patience = max(PATIENCE, 20 * float(entry.built["seconds"]))
            bring(content, folder, self._tried_read, Lines(self.share, meanwhile), patience=patience, like=self._like)
        except Absent as error:
            self._mend.add(digest)
            self._say(f"{self.spec.shown} has lost parts of an entry ({error}); building locally")
        except Unusable as error:
            self._give_up(error)
        except WrongBytes as error:
            self._wrong(digest, error)
        except (IsADirectoryError, FileExistsError, NotADirectoryError) as error:  # a path below a file
            self._wrong(digest, WrongBytes(path, b"", f"its files conflict ({error.strerror})"))
        else:
            return True
        return False

    def disbelieve(self, entry: Stored) -> None:
        """Report that an entry's files do not have its tree digest."""
        error = WrongBytes(form.object_path(entry.object), b"", "its pieces do not add up to its files")
        self._wrong(entry.action.digest, error)

    def _read(
        self, path: str, limit: int, parse: Callable[[bytes], T], meanwhile: Callable[[], None], *, signed: bool = False
    ) -> T:
        """Read and parse a file; all tries together take at most the timeout. signed: if there are trusted signers, one
        must have signed it. Raises WrongBytes, Absent, Unusable, Untrusted."""

        def read(path: str, limit: int) -> bytes:
            return Lines(self.share, meanwhile).one(lambda: self._tried_read(path, limit))

        data, trust = read(path, limit), self.spec.trust
        try:
            found = parse(data)
            if signed and trust:
                require_signed(data, trust, lambda: read(signature_path(data), MOST_OF_SIGNATURE))
        except BadRecord as error:
            raise WrongBytes(path, data, str(error)) from error
        return found

    def _tried_read(self, path: str, limit: int) -> bytes:
        def ended() -> bool:
            return self._offered.abandoned.is_set() or not self._read_from

        try:
            return _tried(lambda: self.share.read(path, limit), ended)
        except TooLong as error:
            raise WrongBytes(path, b"", str(error)) from error

    @property
    def _read_from(self) -> bool:
        return self.unusable is None and self.distrusted is None

    def _like(self, path: str, size: int) -> Sequence[Path]:
        """Return the cache's files of this path and size, newest first."""
        found = []
        for folder in self._layout.objects.glob("*/*"):
            with suppress(BadTree, OSError):
                if any(entry.path == path and entry.size == size for entry in read_manifest(folder, folder.name)):
                    found.append((folder.stat().st_mtime, folder / "files" / path))
        return [file for _, file in sorted(found, reverse=True)]

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Push results offered in the body. Its end waits until all are pushed or the remote is given up; an exception
        abandons the rest: an incomplete upload does not count there."""
        self._offered.abandoned.clear()
        try:
            yield
            pushed = self._offered.finish(stop.check)
        except BaseException:
            self._offered.abandoned.set()
            raise
        if pushed.results:
            self.tell(
                f"pushed {pushed.results} results to {self.spec.shown}: {spell_bytes(pushed.bytes)} sent, "
                f"{spell_bytes(pushed.there)} were there"
            )

    def offer(self, record: Record) -> None:
        if self.spec.push and not self._shut:
            self._offered.offer(record)

    def push(self, record: Record, meanwhile: Callable[[], None] = lambda: None) -> Sent | None:
        """Push one result now. Returns None, and reports why, if that fails."""
        if self._shut:
            return None
        digest, lines = record.action.digest, Lines(self.share, meanwhile)
        mend, rewrite = digest in self._mend, digest in self._wrongs

        def attempt() -> Sent:
            signer, trust = self._signer, self.spec.trust
            return send(record, lines, self._cuts, mend=mend, rewrite=rewrite, signer=signer, trust=trust)

        try:
            sent = _tried(attempt)
        except Unusable as error:
            self._close(error)
        except (DamagedHere, OSError) as error:
            self._say(f"not pushed: {error}")
        else:
            self._mend.discard(digest)
            self._wrongs.discard(digest)
            return sent
        return None

    def vouch(self, objects: Iterable[str], said: Claim) -> None:
        """Push a claim that these objects were verified, if pushing is enabled."""
        if not self.spec.push or self._shut:
            return
        try:
            claim(self.share, objects, said, self._signer)
        except (Unusable, UsageError) as error:  # Sigstore may not answer
            self._close(error)

    def claims(self, objects: Iterable[str]) -> Mapping[str, Sequence[Claim]]:
        """Return the verification claims of objects; empty if the remote cannot be listed."""
        if self._read_from:
            with suppress(Unusable):
                return claims(self.share, self.spec.trust, objects, stop.check)
        return {}

    def require_usable(self) -> None:
        if (why := self.unusable or self.distrusted or self.closed) is not None:
            raise Unusable(why)

    @property
    def _shut(self) -> bool:
        return self.closed is not None or self.unusable is not None

    def _give_up(self, error: Unusable) -> None:
        with self._lock:
            if self.unusable is not None:
                return
            self.unusable = str(error)
        self._say(f"the remote cache {self.spec.shown} is not used for the rest of this run: {error}")

    def _close(self, error: Exception) -> None:
        with self._lock:
            if self.closed is not None:
                return
            self.closed = str(error) if isinstance(error, Unusable | UsageError) else f"{type(error).__name__}: {error}"
        why = f"{self.closed}; run `sdflow cache push` later"
        self._say(f"nothing is pushed to {self.spec.shown} for the rest of this run: {why}")

    def _wrong(self, action: str, error: WrongBytes) -> None:
        """Quarantine the remote's wrong content and read nothing more from it in this run."""
        self._mend.add(action)
        self._wrongs.add(action)
        with self._lock:
            if self.distrusted is not None:  # another thread has reported it
                return
            self.distrusted = str(error)
        place = keep_bytes(self._layout, error.path, error.data, f"{self.spec.shown}: {error}")
        kept = f"; {'its answer' if error.data else 'the reason'} is in {place}" if place else ""
        self._say(
            f"{self.spec.shown} returned wrong content: {error}{kept}; nothing is fetched from it for the rest of this run"
        )

    def _say(self, text: str) -> None:
        with self._lock:
            if text in self._said:
                return
            self._said.add(text)
        self.tell(text)


def _tried(do: Callable[[], T], ended: Callable[[], bool] = lambda: False) -> T:
    """Call `do`, retrying non-final Unusable up to TRIES times in all unless `ended`. Raises the last error."""
    for pause in (PAUSE * 2**attempt for attempt in range(TRIES - 1)):
        try:
            return do()
        except Unusable as error:
            if error.final or ended():
                raise
            log.debug("%s; trying again", error)
            time.sleep(pause)
    return do()
