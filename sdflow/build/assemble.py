"""Assemble artifacts into a pipeline folder in the diffusers layout.

A submodel's folder is a *directory* symlink to its artifact (onnx refuses weight files that are links), or a copy. The
folder is built next to its final place and swapped in atomically: readers find the old pipeline or the new one, even
after a crash.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from sdflow.artifact import Artifact
from sdflow.build.pipeline_folder import Content, Layout, lay_out
from sdflow.disk.input_file import read_input
from sdflow.disk.locked_folder import alone_in, locked_folder
from sdflow.disk.replace_folder import remove_stale, staging_place, swap, sync_directory, sync_tree
from sdflow.errors import CacheError, UsageError, os_errors_as
from sdflow.manifest import MANIFEST_FILE, REFINER, NewerManifest, Origin, read_manifest
from sdflow.manifest.provenance import PROVENANCE_FILE, read_provenance, subjects_of
from sdflow.sources.checkpoint import FileDigests, PlainDigests
from sdflow.sources.companions import companion_files

COPIED_AT_ONCE = 1 << 26
"""Bytes copied between two checks for cancellation."""


@dataclass(frozen=True)
class Assembled:
    """A pipeline folder. changed: false if it was already up to date and nothing was written. pinned: the result of
    `Pinning.pin`. mended: the problem of the previous sdflow.json, if any."""

    path: Path
    changed: bool
    pinned: bool = True
    mended: str | None = None


class Pinning(Protocol):
    """Protects the targets of a pipeline's links, and remembers output folders (`sdflow.store.Cache`)."""

    def pin(self, name: str, digests: Iterable[str], folder: Path, described: Path, files: Iterable[str]) -> bool: ...

    def files_put(self, folder: Path) -> frozenset[str] | None: ...

    def note_output_folder(self, folder: Path) -> None: ...


def assemble(
    out: Path,
    *,
    parts: Mapping[str, Artifact],
    companions: Mapping[str, Path],
    origin: Origin,
    options: Mapping[str, Any] | None = None,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
    refiner: Content | None = None,
    copy: bool = False,
    check: Callable[[], None] = lambda: None,
    keeper: Pinning | None = None,
    digests: FileDigests | None = None,
    provenance: Callable[[Layout], bytes] | None = None,
) -> Assembled:
    """Make `out` the pipeline of these artifacts.

    parts, companions, origin, options, changed: see `Content`. refiner: the content of the folder of that name in it.
    copy: copies instead of links; always on Windows. check: called now and then, and once right before the swap; if it
    raises, `out` stays unchanged. keeper: protects the targets of links, from before the swap; None for a temporary
    folder, which need not survive a power failure. digests: of files, to find whether `out` is up to date. provenance:
    the content of provenance.json; an existing one with the same files is kept, whatever its date.
    Raises UsageError if `out` is anything but a pipeline made by sdflow, CacheError if it cannot be written.
    """
    out = out.parent.resolve() / out.name  # a link at `out` itself is not ours, and is refused below
    copy = copy or sys.platform == "win32"
    layout = lay_out(Content(parts, companions, origin, options or {}, changed or {}), refiner, copy=copy)

    def pin(folder: Path) -> bool:
        if keeper is None:
            return True
        if not copy:
            used = [artifact.digest for artifact in layout.parts.values()]
            return keeper.pin(origin.name, used, out, folder, layout.manifest.files)
        with suppress(CacheError):  # it links to nothing; the pin only records its files
            keeper.pin(origin.name, [], out, folder, layout.manifest.files)
        return True

    remedy = "What was there before is unchanged. Free space or fix the permissions, then run again."
    with os_errors_as("the pipeline cannot be written", out, remedy, CacheError, of_many=True):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(out)
        with alone_in(out.parent, check):  # no other run may swap between two checks
            mended = _refuse_foreign(out, layout, keeper)
            statement = None if provenance is None else provenance(layout)
            if _is_current(out, layout, digests or PlainDigests()) and (
                statement is None or _names_the_same(out, statement)
            ):
                return Assembled(out, changed=False, pinned=pin(out))
        if keeper is not None:
            keeper.note_output_folder(out.parent)
        with locked_folder(staging_place(out), mode=0o777) as staging:  # it becomes `out`, which others may read
            _fill(staging, out, layout, check)
            if statement is not None:
                (staging / PROVENANCE_FILE).write_bytes(statement)
            if keeper is not None:
                sync_tree(staging)
            with alone_in(out.parent, check):
                check()
                mended = _refuse_foreign(out, layout, keeper)
                pinned = pin(staging)
                swap(staging, out)
                if keeper is not None:
                    sync_directory(out.parent)  # before the old folder is removed
                    sync_directory(out.parent.parent)
    return Assembled(out, changed=True, pinned=pinned, mended=mended)


# Contents


def _fill(staging: Path, out: Path, layout: Layout, check: Callable[[], None]) -> None:
    for name, folder in layout.companions.items():
        for file in companion_files(folder):
            copy_file(folder / file, staging / name / file, check)
    for name, artifact in layout.parts.items():
        if layout.manifest.copied:
            for entry in artifact.files:
                copy_file(artifact.path / entry.path, staging / name / entry.path, check)
        else:
            _link(staging / name, link_target(out / PurePosixPath(name).parent, artifact.path))
    for name, target in layout.links.items():
        _link(staging / name, Path(target))
    for name, content in layout.described.items():
        (staging / name).write_bytes(content)


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target, target_is_directory=True)


def link_target(out: Path, artifact: Path) -> Path:
    """The target of a link in the folder `out` to `artifact`.

    Relative if both are in one project, so that the project can be moved or mounted elsewhere as a whole. Absolute if
    they share only the home directory or a folder above it, so that each can move alone.
    """
    place, target = out.parent.resolve() / out.name, artifact.resolve()
    home = Path(os.environ.get("HOME") or os.environ.get("USERPROFILE") or os.sep).resolve()
    try:
        shared = Path(os.path.commonpath([place, target]))
    except ValueError:  # Windows: two drives
        return target
    if home.is_relative_to(shared):
        return target
    return Path(os.path.relpath(target, place))


def copy_file(source: Path, destination: Path, check: Callable[[], None] = lambda: None) -> None:
    """Copy a file's content, sharing blocks where the file system can (btrfs, XFS, NFS 4.2, APFS)."""
    check()
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not hasattr(os, "copy_file_range"):
        shutil.copyfile(source, destination)
        return
    try:
        with source.open("rb") as reader, destination.open("wb") as writer:
            while os.copy_file_range(reader.fileno(), writer.fileno(), COPIED_AT_ONCE):
                check()
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        shutil.copyfile(source, destination)


# Existing folders


def require_replaceable(out: Path, keeper: Pinning | None) -> None:
    """Raises UsageError before the build if `assemble` would refuse `out`."""
    out = out.parent.resolve() / out.name
    with os_errors_as("the pipeline cannot be written", out, kind=CacheError, of_many=True):
        _refuse_foreign(out, None, keeper)


def _refuse_foreign(out: Path, layout: Layout | None, keeper: Pinning | None) -> str | None:
    """Raises UsageError if `out` holds anything that `assemble` did not put there.

    Returns the problem of its sdflow.json, if the keeper knows the folder's files without it. layout: None before it is
    known.
    """
    if not os.path.lexists(out):
        return None
    remedy = "Name another output folder, or move it away."
    if out.is_symlink() or not out.is_dir():
        raise UsageError("this is not a folder, and is not replaced", where=str(out), remedy=remedy)
    found = _entries(out)
    if not found:
        return None
    damage = None
    try:
        known = files_of_sdflow(out)
    except UsageError as error:
        put = None if keeper is None or isinstance(error, NewerManifest) else keeper.files_put(out)
        if put is None:
            raise _not_ours(out, error) from error
        damage = (
            "it had no sdflow.json" if MANIFEST_FILE not in found else f"its sdflow.json was unusable ({error.what})"
        )
        if layout is None:
            return damage
        known = {*put, *layout.manifest.files}
    if foreign := sorted(found - known - {PROVENANCE_FILE}):
        names = ", ".join(foreign[:5]) + (" ..." if len(foreign) > 5 else "")
        raise UsageError(
            f"this pipeline folder holds files that sdflow did not put there, so it is not replaced: {names}",
            where=str(out),
            remedy="Move them elsewhere, then run again.",
        )
    return damage


def files_of_sdflow(out: Path) -> set[str]:
    """Every file that sdflow may have put into a pipeline folder. Raises UsageError if it is not a pipeline."""
    return {*read_manifest(out).files, *_pulled(out), PROVENANCE_FILE}


def _pulled(out: Path) -> set[str]:
    """The files of a pulled pipeline: submodels that were links when pushed are copies."""
    manifest = read_manifest(out)
    files = {f"{name}/{entry.path}" for name, part in manifest.parts.items() for entry in part.files}
    if manifest.origin.refiner == REFINER and (out / REFINER / MANIFEST_FILE).is_file():
        files |= {f"{REFINER}/{name}" for name in _pulled(out / REFINER)}
    return files


def _not_ours(out: Path, error: UsageError) -> UsageError:
    """The error for a folder that is not provably a pipeline. error: of its sdflow.json."""
    remedy = "Name another output folder, or move it away."
    if not os.path.lexists(out / MANIFEST_FILE):
        return UsageError(
            "this folder has no sdflow.json, so it is not an sdflow pipeline, and is not replaced",
            where=str(out),
            remedy=remedy,
        )
    return UsageError(
        f"the folder is not replaced, because its sdflow.json does not list its files: {error.what}",
        where=str(out / MANIFEST_FILE),
        remedy="If the folder is a pipeline, delete it and run again. Otherwise, name another output folder.",
    )


def _entries(folder: Path) -> set[str]:
    """Every file and link below `folder`, as POSIX paths, without following links."""
    found: set[str] = set()
    for directory, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(directory) / name).is_symlink()]
        found.update((Path(directory) / name).relative_to(folder).as_posix() for name in [*files, *links])
    return found


def _names_the_same(out: Path, statement: bytes) -> bool:
    """Whether the existing provenance lists the same files with the same digests."""
    try:
        found = read_provenance(out)
    except UsageError:
        return False
    return found is not None and subjects_of(found) == subjects_of(json.loads(statement))


def _is_current(out: Path, layout: Layout, digests: FileDigests) -> bool:
    """Whether `out` is already this pipeline: every file has the right content, every link leads to its artifact, and
    there is nothing else."""

    def same(name: str, path: str) -> bool:
        if f"{name}/{path}" in layout.described:  # replaces the companion's own
            return True
        return digests.digest(out / name / path) == digests.digest(layout.companions[name] / path)

    try:
        if _entries(out) - {PROVENANCE_FILE} != set(layout.manifest.files):
            return False
        if any(read_input(out / name) != content for name, content in layout.described.items()):
            return False
        if any((out / name).readlink() != Path(target) for name, target in layout.links.items()):
            return False
        if not all(same(name, path) for name, folder in layout.companions.items() for path in companion_files(folder)):
            return False
        if not layout.manifest.copied:
            return all((out / name).samefile(artifact.path) for name, artifact in layout.parts.items())
        return all(
            (out / name / file.path).stat().st_size == file.size
            and digests.digest(out / name / file.path) == file.sha256
            for name, artifact in layout.parts.items()
            for file in artifact.files
        )
    except OSError:
        return False
