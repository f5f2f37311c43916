"""`sdflow push`: uploads a pipeline folder to a registry, skipping blobs that the repository has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from sdflow.build.assemble import files_of_sdflow
from sdflow.digest import inside
from sdflow.disk.input_file import open_input
from sdflow.errors import UsageError, VerificationError
from sdflow.manifest import REFINER, read_manifest
from sdflow.oci.artifact import manifest_of
from sdflow.oci.reference import Reference
from sdflow.oci.registry import Registry, RegistryError
from sdflow.runtime.files.soundness import require_sound_pipeline
from sdflow.sources import FileDigests
from sdflow.units import spell_bytes
from sdflow.verify.folder.provenance import compare_with_provenance


@dataclass(frozen=True)
class Pushed:
    """A pushed pipeline.

    exact: reference by manifest digest. sent: uploaded files. kept: files the repository had. bytes: uploaded.
    """

    reference: Reference
    exact: Reference
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    bytes: int


def push(
    reference: Reference,
    folder: Path,
    digests: FileDigests,
    *,
    plain: bool = False,
    progress: Callable[[str], None] = lambda phrase: None,
) -> Pushed:
    """Upload a pipeline, the manifest last, so that a tag never names an incomplete pipeline.

    Raises VerificationError if a file differs from what was built, RegistryError if the registry rejects it.
    """
    if reference.digest is not None:
        raise UsageError("you cannot push to a digest", where=str(reference), remedy="Name a tag.")
    registry = Registry(reference, plain=plain)
    pipeline = read_manifest(folder)
    progress("comparing the files with what was built")
    require_sound_pipeline(folder)
    for found in compare_with_provenance(folder, digests):
        raise VerificationError(str(found), where=str(folder))
    files = {name: folder / name for name in sorted(_files(folder))}
    if more := sorted(files.keys() - files_of_sdflow(folder)):  # a later pull could not replace them
        raise UsageError(
            f"this pipeline folder holds files that sdflow did not put there: {_some(more)}",
            where=str(folder),
            remedy="Move them elsewhere, then push again.",
        )
    layers = {name: (digests.digest(path), path.stat().st_size) for name, path in files.items()}
    manifest, config = manifest_of(pipeline, layers)
    sent: dict[str, str] = {}
    kept: list[str] = []
    moved = 0
    for index, (name, (sha, size)) in enumerate(layers.items(), 1):
        if sha in sent or registry.has(f"sha256:{sha}"):
            kept.append(name)
            continue
        progress(f"{name}, {index} of {len(layers)} files, {spell_bytes(size)}")
        with open_input(files[name]) as stream:
            registry.upload(stream, f"sha256:{sha}", size)
        sent[sha] = name
        moved += size
    config_digest = f"sha256:{sha256(config).hexdigest()}"
    if not registry.has(config_digest):
        registry.upload(BytesIO(config), config_digest, len(config))
    registry.put_manifest(manifest, reference)
    exact = reference.at(f"sha256:{sha256(manifest).hexdigest()}")
    if registry.manifest(exact)[0] != manifest:
        raise RegistryError("the registry stores a different manifest than was sent", where=str(reference))
    return Pushed(reference, exact, tuple(sent.values()), tuple(kept), moved)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _files(folder: Path, within: str = "") -> Iterator[str]:
    """Yield every file, following only the pipeline's own links to artifacts."""
    place = folder / within if within else folder
    links = {*read_manifest(place).parts} if within in ("", REFINER) else set()
    for path in place.iterdir():
        name = f"{within}/{path.name}" if within else path.name
        if path.is_symlink() and not (path.name in links and path.is_dir()):
            raise UsageError("a link that sdflow did not make is not followed", where=str(path), remedy="Move it away.")
        if path.is_dir():
            yield from _files(folder, name)
        elif path.is_file() and inside(name):
            yield name
        else:
            raise UsageError("is not a regular file with a portable name", where=str(path), remedy="Move it away.")
