"""Artifacts to a pipeline folder in the diffusers layout.

A submodel's folder is a *directory* symlink to its artifact (onnx refuses weight files that are links themselves), or
a copy. The folder is built beside its final place and exchanged with what is there in one step, so that a reader, or
whoever comes after a crash, finds the old pipeline or the new one.
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
"""Bytes, between two looks whether the run was ended."""


@dataclass(frozen=True)
class Assembled:
    """A pipeline folder. changed: false when it already was what was asked for, and nothing was written.
    pinned: what `Pinning.pin` said. mended: what was wrong with the sdflow.json that was there, if anything."""

    path: Path
    changed: bool
    pinned: bool = True
    mended: str | None = None


class Pinning(Protocol):
    """Protects what a pipeline links to, and remembers where pipelines are put together (`sdflow.store.Cache`)."""

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

    parts, companions, origin, options, changed: as of `Content`. refiner: what lies in the folder of that name in it. copy: real
    copies in place of links; always so on Windows. check: called now and then, and when everything is there, right before it
    takes its place: what it raises leaves `out` as it was. keeper: of what the folder links to, from before it takes its place;
    None: the folder is for the moment, and need not outlive a power cut. digests: of files, to tell whether `out` is current.
    provenance: the content of provenance.json; one that names the same files is left as it is, whenever it was written.
    Raises UsageError when `out` is something else than a pipeline made here, CacheError when it cannot be written.
    """
    out = out.parent.resolve() / out.name  # a link at `out` itself is somebody's, and refused below
    copy = copy or sys.platform == "win32"
    layout = lay_out(Content(parts, companions, origin, options or {}, changed or {}), refiner, copy=copy)

    def pin(folder: Path) -> bool:
        if keeper is None:
            return True
        if not copy:
            used = [artifact.digest for artifact in layout.parts.values()]
            return keeper.pin(origin.name, used, out, folder, layout.manifest.files)
        with suppress(CacheError):  # it uses nothing; the pin only says what was put there
            keeper.pin(origin.name, [], out, folder, layout.manifest.files)
        return True

    remedy = "What was there before is unchanged. Free space or fix the permissions, then run again."
    with os_errors_as("the pipeline cannot be written", out, remedy, CacheError, of_many=True):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(out)
        with alone_in(out.parent, check):  # another run's exchange must not come between two looks
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
                    sync_directory(out.parent)  # before what was there goes
                    sync_directory(out.parent.parent)
    return Assembled(out, changed=True, pinned=pinned, mended=mended)


# What goes in


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
    """Where a link in the folder `out` points to reach `artifact`.

    Relative when both lie in one project, so that the project can be moved or mounted elsewhere as a whole. Absolute
    when all they share is the home directory or something above it: then each may move without the other.
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
    """Copy the content; share the blocks where the file system can (btrfs, XFS, NFS 4.2, APFS)."""
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


# What is there already


def require_replaceable(out: Path, keeper: Pinning | None) -> None:
    """Raises UsageError where it is known before anything is built that `assemble` would refuse `out`."""
    out = out.parent.resolve() / out.name
    with os_errors_as("the pipeline cannot be written", out, kind=CacheError, of_many=True):
        _refuse_foreign(out, None, keeper)


def _refuse_foreign(out: Path, layout: Layout | None, keeper: Pinning | None) -> str | None:
    """Raises UsageError when `out` holds anything that `assemble` did not put there.

    Returns what is wrong with its sdflow.json, where the keeper knows without it what was put there. layout: None where it is not
    known yet.
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
            f"this pipeline folder holds files that sdflow did not put there, and is not replaced: {names}",
            where=str(out),
            remedy="Move them elsewhere, then run again.",
        )
    return damage


def files_of_sdflow(out: Path) -> set[str]:
    """Every file that sdflow may have put into a pipeline folder. Raises UsageError for a folder that is none."""
    return {*read_manifest(out).files, *_pulled(out), PROVENANCE_FILE}


def _pulled(out: Path) -> set[str]:
    """The files of a pipeline whose submodels were links where it was pushed from, and are copies where it was pulled to."""
    manifest = read_manifest(out)
    files = {f"{name}/{entry.path}" for name, part in manifest.parts.items() for entry in part.files}
    if manifest.origin.refiner == REFINER and (out / REFINER / MANIFEST_FILE).is_file():
        files |= {f"{REFINER}/{name}" for name in _pulled(out / REFINER)}
    return files


def _not_ours(out: Path, error: UsageError) -> UsageError:
    """The error for a folder that nothing proves to be a pipeline. error: of its sdflow.json."""
    remedy = "Name another output folder, or move it away."
    if not os.path.lexists(out / MANIFEST_FILE):
        return UsageError(
            "this folder has no sdflow.json, so it is not a pipeline made by sdflow, and is not replaced",
            where=str(out),
            remedy=remedy,
        )
    return UsageError(
        f"the folder is not replaced, as its sdflow.json does not say what sdflow put there: {error.what}",
        where=str(out / MANIFEST_FILE),
        remedy="If the folder is a pipeline, delete it and run again. Otherwise, name another output folder.",
    )


def _entries(folder: Path) -> set[str]:
    """Every file and link below `folder`, as POSIX paths; links are not followed."""
    found: set[str] = set()
    for directory, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(directory) / name).is_symlink()]
        found.update((Path(directory) / name).relative_to(folder).as_posix() for name in [*files, *links])
    return found


def _names_the_same(out: Path, statement: bytes) -> bool:
    """Whether the provenance that is there names these files with these digests."""
    try:
        found = read_provenance(out)
    except UsageError:
        return False
    return found is not None and subjects_of(found) == subjects_of(json.loads(statement))


def _is_current(out: Path, layout: Layout, digests: FileDigests) -> bool:
    """Whether `out` already is this pipeline: every file is there with the content that it would be given, every link
    leads to its artifact, and there is nothing else."""

    def same(name: str, path: str) -> bool:
        if f"{name}/{path}" in layout.described:  # in place of the companion's own
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
