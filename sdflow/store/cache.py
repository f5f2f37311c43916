"""The content-addressed cache of build steps.

An entry is an action file that names an object. `lookup` checks the digest of the action file, that it belongs to the
action, and the object's file sizes and content (by the stat cache) against its manifest; `check` hashes every byte.
Damaged entries are quarantined and count as never built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from sdflow.artifact import Action, Artifact, Record
from sdflow.errors import CacheError, PassError, UsageError
from sdflow.store import objects, pins
from sdflow.store.gc import Entry, GcReport, clean, collect, entries
from sdflow.store.layout import FULL, READ_ONLY, Layout, cache_error, log, put_aside, reading, remove_tree, writing
from sdflow.store.locks import GUARD, Lease, file_lock, held
from sdflow.store.notes import Notes, note
from sdflow.store.objects import AbsentObject, BadTree, VerifyReport, find
from sdflow.store.publish import Staging
from sdflow.store.records import BadRecord, Stored, load_action, read_record
from sdflow.store.remote.down import incoming
from sdflow.store.remote.entry import Cuts, no_cuts
from sdflow.store.remote.remote import Remote
from sdflow.store.remote.spec import RemoteSpec
from sdflow.store.remote.up import FROM
from sdflow.store.signing import Signer
from sdflow.store.stat_cache import StatCache


class CorruptArtifactError(CacheError):
    """An artifact is missing, or damaged and now quarantined. Its action must be built again."""


class Cache:
    """A cache directory, created by the first write. Raises UsageError if the root is a file.

    salt: part of every action, to separate otherwise equal entries. rehash: ignore stored digests and read every file.
    remote: source of `fetch`, and destination if pushing is enabled. cuts: where to split files. signer: for uploads.
    """

    def __init__(
        self,
        root: Path,
        *,
        salt: str = "",
        rehash: bool = False,
        remote: RemoteSpec | None = None,
        cuts: Cuts = no_cuts,
        signer: Signer | None = None,
    ) -> None:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is a file, not a folder", where="--cache", remedy="Use another folder.")
        self.root, self.salt = root, salt
        self._layout = Layout(root)
        self._rehash, self._cuts, self._signer = rehash, cuts, signer
        self.stat = StatCache(self._layout, rehash=rehash)
        self.notes = Notes(self._layout)
        self.remote = None if remote is None else Remote(remote, self._layout, cuts, signer)
        self._lease: Lease | None = None
        self._damaged: set[str] = set()  # objects that could not be quarantined

    def at(self, remote: RemoteSpec, signer: Signer | None = None) -> Cache:
        signer = signer or self._signer
        return Cache(self.root, salt=self.salt, rehash=self._rehash, remote=remote, cuts=self._cuts, signer=signer)

    def lookup(self, action: Action) -> Record | None:
        """Return the finished action, or None if it must be built. Raises CacheError if the cache cannot be read."""
        path = self._layout.action(action.digest)
        with reading(self.root):
            try:
                stored = load_action(read_record(path))
                if stored.action.digest != action.digest:
                    raise BadRecord("it belongs to another action")
            except (FileNotFoundError, NotADirectoryError):
                return None
            except BadRecord as error:
                put_aside(self._layout, [path], str(error))
                return None
            lease = self._lease
            if lease is not None:
                note(self._layout, lambda: lease.add(stored.object), "a lease")
            if stored.object in self._damaged:
                return None
            try:
                artifact = find(self._layout, self.stat, stored.object)
            except AbsentObject:
                return None
            except BadTree as error:
                self._quarantine(stored.object, str(error), path)
                return None
        try:
            os.utime(path)  # last use, for `gc`
        except OSError as error:
            log.debug("the last use of %s was not recorded: %s", path, error)
        return Record(action, artifact, stored.facts, stored.built)

    def fetch(self, action: Action, meanwhile: Callable[[], None] = lambda: None) -> Record | None:
        """Download an action from the remote and publish it; None if that fails: `Remote.tell` gets the reason. Call it
        with the action's lock, after `lookup`. An exception from `meanwhile` ends the wait."""
        if (remote := self.remote) is None:
            return None
        try:
            with self._incoming(remote, action, meanwhile) as found:
                if found is None:
                    return None
                entry, folder = found
                with self.staging(action) as staging:
                    for path in folder.iterdir():
                        path.replace(staging.files / path.name)
                    remove_tree(folder)
                    if staging.tree_digest() != entry.object:
                        remote.disbelieve(entry)
                        return None
                    return staging.publish(entry.facts, {**entry.built, FROM: remote.spec.shown})
        except (CacheError, PassError) as error:
            remote.tell(f"not fetched from {remote.spec.shown}: {error.what}")
            return None

    def bring(self, action: Action, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Download and check an action's files for a later `fetch`. False if that fails, as None from `fetch`."""
        if (remote := self.remote) is None:
            return False
        with self._incoming(remote, action, meanwhile) as found:
            if found is None or objects.tree_of(found[1]) == found[0].object:
                return found is not None
            remote.disbelieve(found[0])
            return False

    @contextmanager
    def _incoming(
        self, remote: Remote, action: Action, meanwhile: Callable[[], None]
    ) -> Iterator[tuple[Stored, Path] | None]:
        """Yield the remote's entry and the folder with its files, locked for this process; None if unavailable."""
        entry = remote.look(action.digest, meanwhile) if self.writable else None
        if entry is None:
            yield None
            return
        self._layout.ensure()
        with writing(self.root), held(self._layout.lock(f"incoming-{entry.object}"), meanwhile=meanwhile):
            folder = incoming(self._layout, entry)
            yield (entry, folder) if remote.bring(entry, folder, meanwhile) else None

    def offer(self, record: Record) -> None:
        """Queue a result for the remote if pushing is enabled. The end of `lease` waits for the upload."""
        if self.remote is not None:
            self.remote.offer(record)

    @property
    def writable(self) -> bool:
        """Whether the cache folder, or the folder it would be created in, is writable."""
        places = (self._layout.staging, *self._layout.staging.parents)
        return os.access(next(place for place in places if place.exists()), os.W_OK)

    def check(self, artifact: Artifact) -> None:
        """Hash an artifact before it is read or copied. If damaged, quarantine it and raise CorruptArtifactError."""
        with reading(self.root):
            try:
                find(self._layout, self.stat, artifact.digest, anew=True)
            except BadTree as error:
                if not isinstance(error, AbsentObject):
                    self._quarantine(artifact.digest, str(error))
                raise CorruptArtifactError(
                    f"the artifact is damaged: {error}",
                    where=str(artifact.path),
                    remedy="Run again to rebuild it. If this recurs, check the disk and the memory.",
                ) from error

    def _quarantine(self, digest: str, reason: str, *actions: Path) -> None:
        if not put_aside(self._layout, [self._layout.object(digest), *actions], reason):
            self._damaged.add(digest)

    @contextmanager
    def staging(self, action: Action, *, keep_failed: bool = False) -> Iterator[Staging]:
        """Yield a directory to write into, removed at the end unless published or `keep_failed`. Raises CacheError."""
        self._layout.ensure()
        path = self._layout.staging / f"{action.digest[:12]}-{os.getpid()}-{os.urandom(4).hex()}"
        owner = path.with_name(f"{path.name}.lock")
        with ExitStack() as stack:
            with writing(self.root):
                lease = self._lease or stack.enter_context(closing(Lease(self._layout)))
                lock = file_lock(owner)
                lock.acquire()  # held while we live: `gc` removes directories whose lock is free
            staging = Staging(self._layout, self.stat, action, path, lease, self.lookup)
            try:
                with writing(self.root):
                    staging.files.mkdir(parents=True)
                yield staging
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise cache_error(self.root, error, written=staging.bytes_written()) from error
            finally:
                staging.clear(keep=keep_failed)
                owner.unlink(missing_ok=True)
                lock.release()

    @contextmanager
    def lock(
        self, action: Action, waiting: Callable[[], None] = lambda: None, meanwhile: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Lock an action (see `held`) to build it once: look up, lock, look up again, build. Raises CacheError."""
        self._layout.ensure()
        with ExitStack() as stack:
            with writing(self.root):
                stack.enter_context(held(self._layout.lock(action.digest), waiting, meanwhile))
            yield

    def forget(self, action: Action) -> None:
        """Delete the action, so that it is built again. `gc` removes its object if no other action produced it."""
        with writing(self.root):
            self._layout.action(action.digest).unlink(missing_ok=True)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Protect objects looked up or published in the body from the `gc` of any process, until offered results are
        uploaded. Does nothing on a read-only cache."""
        if self._lease is not None:  # nested
            yield
            return
        with ExitStack() as stack:

            def make() -> None:
                self._layout.ensure()
                self._lease = stack.enter_context(closing(Lease(self._layout)))

            try:
                note(self._layout, make, "a lease")
                with self.remote.pushing() if self.remote is not None else ExitStack():
                    yield
            finally:
                self._lease = None

    def pin(
        self,
        name: str,
        digests: Iterable[str],
        folder: Path | None = None,
        described: Path | None = None,
        files: Iterable[str] = (),
    ) -> bool:
        """Protect the objects of a pipeline while it exists in `folder`. Returns False on a read-only cache. described:
        the folder with its sdflow.json now (staging, as the pin is written first); default: `folder`. files: all files
        put into `folder`. Raises CacheError if an object is missing or the disk is full."""
        pin = pins.Pin(name, folder.absolute() if folder else None, tuple(digests), tuple(files))

        def write() -> None:
            self._layout.ensure()
            with held(self._layout.lock(GUARD)):
                gone = [digest for digest in pin.objects if not self._layout.object(digest).exists()]
                if gone:
                    raise CacheError(
                        f"object {gone[0]} is not in the cache", where=str(self.root), remedy="Run the workflow again."
                    )
                pins.write_pin(self._layout, pin, described if described is not None else pin.folder)

        return note(self._layout, write, f"the pin of {name}", without=READ_ONLY)

    def files_put(self, folder: Path) -> frozenset[str] | None:
        """Return the files that sdflow put into a pipeline without a readable sdflow.json; None if no pin proves it."""
        with reading(self.root):
            return pins.files_put(self._layout, folder.absolute())

    def note_output_folder(self, folder: Path) -> None:
        """Record a folder of pipelines: `gc` removes what killed runs leave there."""

        def write() -> None:
            self._layout.ensure()
            pins.note_output_folder(self._layout, folder.absolute())

        note(self._layout, write, "a folder of pipelines", without=READ_ONLY)

    def entries(self) -> list[Entry]:
        with reading(self.root):
            return [entry for _, entry in entries(self._layout) if isinstance(entry, Entry)]

    def steps(self) -> Iterator[Record]:
        with reading(self.root):
            found = [stored for _, stored in objects.actions(self._layout) if isinstance(stored, Stored)]
        for stored in found:
            if stored.action.of_step and (record := self.lookup(stored.action)):
                yield record

    def gc(self, max_size: int | None = None, *, dry_run: bool = False) -> GcReport:
        """Remove rubbish, and the least recently used unprotected entries above `max_size` bytes. Raises CacheError."""
        return collect(self._layout, self.stat, max_size, dry_run=dry_run)

    def clean(self) -> None:
        """Empty the cache. Raises CacheError if the folder is not an sdflow cache or a run is using it."""
        self.stat.close()
        clean(self._layout)
        self.stat = StatCache(self._layout, rehash=self._rehash)

    def verify(self) -> VerifyReport:
        with reading(self.root):
            return objects.verify(self._layout, self.stat)
