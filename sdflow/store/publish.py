"""Publishing turns a staging directory into an object and then writes the action file, which commits the entry.

A process killed at any moment leaves a whole entry or none: the object appears with one rename, the action file with
one link, and the action file is created only once the object is on disk.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdflow.artifact import Action, Artifact, Facts, Record
from sdflow.digest import FileEntry, canonical_json, digest_tree
from sdflow.disk.atomic_write import unfinished
from sdflow.disk.replace_folder import sync_directory
from sdflow.errors import PassError
from sdflow.store.layout import Layout, discard, log, make_folder, move, put_aside, write_file, writing
from sdflow.store.locks import Lease
from sdflow.store.objects import FILES, MANIFEST, READERS, AbsentObject, BadTree, find, seal, write_manifest
from sdflow.store.records import Stored, dump_action
from sdflow.store.stat_cache import SHA256, Known, StatCache


@dataclass
class Staging:
    """Directory of one build. The pass writes into `files`; `publish` makes them a cache entry."""

    _layout: Layout
    _stats: StatCache
    action: Action
    path: Path
    _lease: Lease
    _lookup: Callable[[Action], Record | None]
    _published: bool = False
    _sealed: Mapping[FileEntry, str] | None = None

    @property
    def files(self) -> Path:
        return self.path / FILES

    def clear(self, *, keep: bool) -> None:
        """Remove the directory. keep: after a failure, rename it to `<name>-failed` instead."""
        if keep and not self._published and self.path.exists():
            move(self.path, self.path.with_name(f"{self.path.name}-failed"))
        elif self.path.exists():
            discard(self._layout, self.path)

    def bytes_written(self) -> int:
        return sum(path.lstat().st_size for path in self.path.rglob("*") if path.is_file())

    def tree_digest(self) -> str:
        """Return the digest without publishing. Seals the files: nothing may be written afterwards."""
        return digest_tree(self._seal())

    def publish(
        self,
        facts: Facts,
        built: Mapping[str, Any],
        digests: Mapping[str, str] = MappingProxyType({}),
        noted: Sequence[tuple[str, str, str]] = (),
    ) -> Record:
        """Publish the files as the action's result, or return the record of a process that published first. digests:
        SHA-256 of files hashed while written. noted: (file, what, value) for the stat cache. Raises PassError for files
        that an object cannot hold, CacheError if the cache cannot be written."""
        canonical_json([facts, built])  # raises now, before anything is published, if they are not JSON
        digest = digest_tree(self._seal(digests))
        with writing(self._layout.root, written=self.bytes_written):
            self._lease.add(digest)
            record = Record(self.action, self._place_object(digest, noted), facts, built)
            data = dump_action(Stored(self.action, digest, facts, built, time.time()))
            while not self._commit(data):
                first = self._lookup(self.action)
                if first is not None:  # another process published first
                    record = first
                    break
                # The existing entry is damaged or its object is gone: replace it.
                self._layout.action(self.action.digest).unlink(missing_ok=True)
            self._published = True
            return record

    def _seal(self, digests: Mapping[str, str] = MappingProxyType({})) -> Mapping[FileEntry, str]:
        if self._sealed is None:
            with writing(self._layout.root, written=self.bytes_written):
                try:
                    self._sealed = seal(self.files, digests)
                except BadTree as error:
                    raise PassError(
                        f"the result cannot be cached: {error}",
                        where=str(self.files),
                        remedy="A pass must write regular files, without links, into its output folder.",
                    ) from error
        return self._sealed

    def _place_object(self, digest: str, noted: Sequence[tuple[str, str, str]]) -> Artifact:
        """Rename our copy into the objects, or use the existing object if it is intact."""
        target, sealed = self._layout.object(digest), self._seal()
        if not (self.path / MANIFEST).exists():
            write_manifest(self.path, tuple(sealed))
        while True:
            try:
                artifact = find(self._layout, self._stats, digest, anew=True)
                log.debug("object %s already exists", digest)
                return artifact
            except AbsentObject:
                pass
            except BadTree as error:
                put_aside(self._layout, [target], str(error))
            make_folder(target.parent)
            try:
                self.path.rename(target)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else another process placed the object: check its copy
        target.chmod(stat.S_IMODE(target.stat().st_mode) & READERS)
        sync_directory(target.parent)
        sync_directory(self._layout.objects)
        artifact = Artifact(digest, target / FILES, tuple(sealed))
        identities = {entry.path: now for entry, now in sealed.items()}
        known = [(entry.path, SHA256, entry.sha256) for entry in sealed]
        self._stats.remember(
            Known(artifact.path / name, what, identities[name], value) for name, what, value in (*known, *noted)
        )
        return artifact

    def _commit(self, data: bytes) -> bool:
        """Write the action file unless it exists: the first process wins."""
        path = self._layout.action(self.action.digest)
        make_folder(path.parent)
        temporary = unfinished(self._layout.staging)
        try:
            write_file(temporary, data)
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                temporary.replace(path)  # without hardlinks, the last process wins
            sync_directory(path.parent)
            sync_directory(self._layout.actions)
            return True
        finally:
            temporary.unlink(missing_ok=True)
