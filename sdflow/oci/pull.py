"""`sdflow pull`: downloads a pipeline from a registry, completely and unchanged, or not at all.

Files are downloaded to a staging folder next to the destination and checked against their digests, then against
`sdflow.json` and the provenance. The folder is then swapped into place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sdflow.build.assemble import copy_file, files_of_sdflow, require_replaceable
from sdflow.disk.locked_folder import alone_in, locked_folder
from sdflow.disk.replace_folder import remove_stale, staging_place, swap, sync_directory, sync_tree
from sdflow.errors import CacheError, UsageError, VerificationError, os_errors_as
from sdflow.manifest import REFINER, read_manifest
from sdflow.manifest.provenance import read_provenance, subjects_of
from sdflow.oci.artifact import FOREIGN, Descriptor, files_of
from sdflow.oci.reference import Reference
from sdflow.oci.registry import Registry
from sdflow.oci.session import LIMITS, Limits
from sdflow.sources import FileDigests
from sdflow.units import spell_bytes


@dataclass(frozen=True)
class Pulled:
    """A pulled pipeline.

    exact: reference by digest. fetched: downloaded files. kept: files copied locally. bytes: downloaded.
    """

    exact: Reference
    folder: Path
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    bytes: int


def pull(
    reference: Reference,
    out: Path,
    digests: FileDigests,
    *,
    plain: bool = False,
    progress: Callable[[str], None] = lambda phrase: None,
    limits: Limits = LIMITS,
) -> Pulled:
    """Download a pipeline to `out`. An existing sdflow pipeline is replaced once the download is complete.

    Raises UsageError if `out` is anything else, VerificationError for wrong content, RegistryError if a transfer fails.
    """
    registry = Registry(reference, plain=plain, limits=limits)
    out = out.parent.resolve() / out.name
    require_replaceable(out, None)
    progress("manifest")
    content, digest = registry.manifest(reference)
    files = files_of(content, str(reference))
    with os_errors_as("the pipeline cannot be written", out, kind=CacheError, of_many=True):
        out.parent.mkdir(parents=True, exist_ok=True)
        _require_space(out, files)
        remove_stale(out)
        with locked_folder(staging_place(out), mode=0o777) as staging:
            fetched, kept = _fill(staging, out, files, registry, digests, progress)
            progress("comparing the files with sdflow.json")
            _require_whole(staging, files, str(reference))
            sync_tree(staging)
            with alone_in(out.parent):
                require_replaceable(out, None)
                swap(staging, out)
                sync_directory(out.parent)
    came = {files[name].digest: files[name].size for name in fetched}
    return Pulled(reference.at(digest), out, tuple(fetched), tuple(kept), sum(came.values()))


def _fill(
    staging: Path,
    out: Path,
    files: dict[str, Descriptor],
    registry: Registry,
    digests: FileDigests,
    progress: Callable[[str], None],
) -> tuple[list[str], list[str]]:
    here: dict[str, Path] = {}
    fetched, kept = [], []
    for index, (name, layer) in enumerate(files.items(), 1):
        place = staging / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (source := here.get(layer.digest)) is None and _is_the_same(out / name, layer, digests):
            source = out / name
        if source is not None:
            copy_file(source, place)
            kept.append(name)
        else:
            progress(f"{name}, {index} of {len(files)} files, {spell_bytes(layer.size)}")
            registry.fetch(layer.digest, layer.size, place)
            fetched.append(name)
        here[layer.digest] = place
    return fetched, kept


def _is_the_same(path: Path, layer: Descriptor, digests: FileDigests) -> bool:
    try:
        return path.stat().st_size == layer.size and f"sha256:{digests.digest(path)}" == layer.digest
    except (OSError, CacheError):
        return False


def _require_space(out: Path, files: dict[str, Descriptor]) -> None:
    needed, free = sum(layer.size for layer in files.values()), shutil.disk_usage(out.parent).free
    if needed > free:
        raise CacheError(
            f"the pipeline needs {spell_bytes(needed)}, but only {spell_bytes(free)} are free",
            where=str(out.parent),
            remedy="Free some space, or name a folder on another disk.",
        )


def _require_whole(folder: Path, files: dict[str, Descriptor], where: str, within: str = "") -> None:
    """Raise VerificationError unless the files are exactly those that sdflow.json and the provenance name."""
    try:
        manifest, statement = read_manifest(folder / within), read_provenance(folder / within)
    except UsageError as error:
        raise VerificationError(f"{within}: {error.what}".removeprefix(": "), where=where, remedy=FOREIGN) from error
    begins = f"{within}/" if within else ""
    named = {f"{name}/{file.path}": file.sha256 for name, part in manifest.parts.items() for file in part.files}
    named |= subjects_of(statement) if statement is not None else {}
    for name, sha256 in named.items():
        layer = files.get(f"{begins}{name}")
        if layer is None or layer.digest != f"sha256:{sha256}":
            what = "lacks" if layer is None else "has another"
            raise VerificationError(f"it {what} {begins}{name:.200}", where=where, remedy=FOREIGN)
    if absent := next((name for name in manifest.files if not (folder / within / name).exists()), None):
        raise VerificationError(f"it lacks {begins}{absent:.200}", where=where, remedy=FOREIGN)
    if not within and (more := sorted(files.keys() - files_of_sdflow(folder))):
        raise VerificationError(
            f"it has {more[0]:.200}, which its sdflow.json does not name", where=where, remedy=FOREIGN
        )
    if manifest.origin.refiner == REFINER and not within:
        _require_whole(folder, files, where, REFINER)
