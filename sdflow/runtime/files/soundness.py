"""Verify a pipeline folder's files against the digests in its manifest.

Each file is read once, and its digest is cached with its stat: for files linked into the cache, in the cache itself,
where the build already recorded it; for standalone folders, in `user_folder("digests")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sdflow.digest import digest_file
from sdflow.disk.user_folder import user_folder
from sdflow.errors import CacheError, UsageError, VerificationError
from sdflow.manifest import Manifest, read_manifest
from sdflow.runtime.files.folder import folder_family, onnx_submodels, refiner_of
from sdflow.runtime.sessions.session import DAMAGED
from sdflow.store import StatCache
from sdflow.store.layout import Layout

FOLDER_VARIABLE = "SDFLOW_DIGESTS"

READERS = 4
"""Number of files read concurrently."""

Digest = Callable[[Path], str]


def require_sound(folder: Path, manifest: Manifest, submodels: Sequence[str]) -> None:
    """Raise VerificationError if a file of these submodels is missing or differs from the manifest."""
    wanted = []
    for name in submodels:
        if (part := manifest.parts.get(name)) is not None:
            digest = _digests(folder / name)
            wanted += [(folder / name / entry.path, entry.sha256, digest) for entry in part.files]
    with ThreadPoolExecutor(READERS) as threads:
        found = threads.map(lambda file: _digest(file[0], file[2]), wanted)
        for (path, expected, _), sha256 in zip(wanted, found, strict=True):
            if sha256 != expected:
                raise VerificationError(
                    "its content differs from what was built",
                    where=str(path),
                    remedy=f"{DAMAGED} --no-check skips this check.",
                )


def require_sound_pipeline(folder: Path, *, checker: bool = True) -> None:
    """Verify a whole pipeline folder and its refiner. checker: include the safety checker.

    Raises UsageError if it is not a pipeline folder.
    """
    require_sound_folders((folder, refiner_of(folder)), checker=checker)


def require_sound_folders(folders: Iterable[Path | None], *, checker: bool) -> None:
    """Verify these pipeline folders, without their own refiners. checker: include the safety checkers."""
    for folder in filter(None, folders):
        absent = None if checker else folder_family(folder).checker
        require_sound(folder, read_manifest(folder), [name for name in onnx_submodels(folder) if name != absent])


def _digest(path: Path, digest: Digest) -> str:
    try:
        return digest(path)
    except OSError as error:
        raise VerificationError(
            f"cannot be read: {error.strerror or error}", where=str(path), remedy=DAMAGED
        ) from error
    except CacheError as error:
        raise VerificationError(error.what, where=error.where, remedy=error.remedy) from error


def _digests(submodel: Path) -> Digest:
    """Return the function that computes digests of a submodel's files, cached in its own cache or per user."""
    place = submodel.resolve()
    if place != submodel.absolute():
        for above in place.parents:
            if (layout := Layout(above)).is_ours():
                return StatCache(layout).digest
    try:
        return StatCache(Layout(user_folder("digests", FOLDER_VARIABLE))).digest
    except UsageError:  # no home directory
        return digest_file
