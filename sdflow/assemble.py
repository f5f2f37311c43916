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
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sdflow import __version__
from sdflow.artifact import Artifact
from sdflow.errors import CacheError, UsageError
from sdflow.replace_folder import remove_stale, staging_beside, swap

MANIFEST_FILE = "sdflow.json"
INDEX_FILE = "model_index.json"
FORMAT_VERSION = 1
ONNX_COMPONENT = ["diffusers", "OnnxRuntimeModel"]

# The same in every Stable Diffusion 1.x and 2.x; old checkpoints name classes that transformers 5 no longer has.
_CLASSES = {
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
}


@dataclass(frozen=True)
class Assembled:
    """A pipeline folder. changed: false when it already was what was asked for, and nothing was written."""

    path: Path
    changed: bool


def assemble(
    out: Path,
    *,
    parts: Mapping[str, Artifact],
    companions: Mapping[str, Path],
    manifest: Mapping[str, Any],
    copy: bool = False,
) -> Assembled:
    """Make `out` the pipeline of these artifacts.

    parts: submodel -> artifact. companions: tokenizer, scheduler, feature_extractor -> folder; small, always copied.
    manifest: JSON that the caller knows, for sdflow.json; its `submodels` may hold more about each part. copy: real
    copies in place of links; always so on Windows.
    Raises UsageError when `out` is something else than a pipeline made here, CacheError when it cannot be written.
    """
    out = out.parent.resolve() / out.name  # a link at `out` itself is somebody's, and refused below
    copy = copy or sys.platform == "win32"
    described = _describe(parts, companions, manifest, copy)
    _refuse_foreign(out)
    if _is_current(out, described):
        return Assembled(out, changed=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with staging_beside(out) as staging:
            _fill(staging, out, parts, companions, described, copy)
            swap(staging, out)
        remove_stale(out)
    except OSError as error:
        raise CacheError(
            f"the pipeline cannot be written: {error.strerror or error}",
            where=str(error.filename or out),
            remedy="What was there before is unchanged. Free space or fix the permissions, then run again.",
        ) from error
    return Assembled(out, changed=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """sdflow.json of a pipeline folder. Raises UsageError when it is missing, damaged, or of a newer format."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError("this is no pipeline of sdflow", where=str(path), remedy="Build one: sdflow run.") from error
    if found != FORMAT_VERSION:
        raise UsageError(f"format_version {found} is not known, only {FORMAT_VERSION}", where=str(path))
    return dict(manifest)


# What goes in


def _describe(
    parts: Mapping[str, Artifact],
    companions: Mapping[str, Path],
    manifest: Mapping[str, Any],
    copy: bool,
) -> dict[str, bytes]:
    """The two JSON files. They hold no path and no date: equal pipelines have equal manifests."""
    components: dict[str, Any] = {
        "_class_name": "OnnxStableDiffusionPipeline",
        "_diffusers_version": version("diffusers"),
        "requires_safety_checker": "safety_checker" in parts,
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }
    for name, folder in companions.items():
        components[name] = ["diffusers", _scheduler_class(folder)] if name == "scheduler" else _CLASSES[name]
    components.update(dict.fromkeys(parts, ONNX_COMPONENT))

    files = [INDEX_FILE, MANIFEST_FILE]
    for name, folder in companions.items():
        files += [f"{name}/{path}" for path in _files(folder)]
    for name, artifact in parts.items():
        files += [f"{name}/{entry.path}" for entry in artifact.files] if copy else [name]

    described = {
        **manifest,
        "format_version": FORMAT_VERSION,
        "sdflow_version": __version__,
        "copied": copy,
        "submodels": {
            name: {
                **manifest.get("submodels", {}).get(name, {}),
                "artifact": artifact.digest,
                "files": [{"path": e.path, "bytes": e.size, "sha256": e.sha256} for e in artifact.files],
            }
            for name, artifact in parts.items()
        },
        "files": sorted(files),
    }
    return {INDEX_FILE: _json(components), MANIFEST_FILE: _json(described)}


def _fill(
    staging: Path,
    out: Path,
    parts: Mapping[str, Artifact],
    companions: Mapping[str, Path],
    described: Mapping[str, bytes],
    copy: bool,
) -> None:
    for name, folder in companions.items():
        for path in _files(folder):
            _copy_file(folder / path, staging / name / path)
    for name, artifact in parts.items():
        if copy:
            for entry in artifact.files:
                _copy_file(artifact.path / entry.path, staging / name / entry.path)
        else:
            (staging / name).symlink_to(link_target(out, artifact.path), target_is_directory=True)
    for name, content in described.items():
        with (staging / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


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


def _copy_file(source: Path, destination: Path) -> None:
    """Copy the content; share the blocks where the file system can (btrfs, XFS, NFS 4.2, APFS)."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not hasattr(os, "copy_file_range"):
        shutil.copyfile(source, destination)
        return
    try:
        with source.open("rb") as reader, destination.open("wb") as writer:
            while os.copy_file_range(reader.fileno(), writer.fileno(), 1 << 30):
                pass
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        shutil.copyfile(source, destination)


def _scheduler_class(folder: Path) -> str:
    config = json.loads((folder / "scheduler_config.json").read_text(encoding="utf-8"))
    return str(config["_class_name"])


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


# What is there already


def _refuse_foreign(out: Path) -> None:
    """Raises UsageError when `out` holds anything that `assemble` did not put there."""
    if not os.path.lexists(out):
        return
    remedy = "Name another output folder, or move it away."
    if out.is_symlink() or not out.is_dir():
        raise UsageError("this is not a folder, and is not replaced", where=str(out), remedy=remedy)
    found = _entries(out)
    if not found:
        return
    try:
        known = set(read_manifest(out)["files"])
    except (UsageError, KeyError) as error:
        raise UsageError(
            "this folder is not a pipeline made by sdflow, and is not replaced", where=str(out), remedy=remedy
        ) from error
    if foreign := sorted(found - known):
        names = ", ".join(foreign[:5]) + (" ..." if len(foreign) > 5 else "")
        raise UsageError(
            f"this pipeline folder holds files that sdflow did not put there, and is not replaced: {names}",
            where=str(out),
            remedy="Move them elsewhere, then run again.",
        )


def _entries(folder: Path) -> set[str]:
    """Every file and link below `folder`, as POSIX paths; links are not followed."""
    found: set[str] = set()
    for directory, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(directory) / name).is_symlink()]
        found.update((Path(directory) / name).relative_to(folder).as_posix() for name in [*files, *links])
    return found


def _is_current(out: Path, described: Mapping[str, bytes]) -> bool:
    """Whether `out` already is the described pipeline: the JSON files are equal, every other file is there in full."""
    try:
        if any((out / name).read_bytes() != content for name, content in described.items()):
            return False
        manifest = json.loads(described[MANIFEST_FILE])
        sizes = {
            f"{name}/{file['path']}": file["bytes"]
            for name, submodel in manifest["submodels"].items()
            for file in submodel["files"]
        }
        present = all((out / name).exists() for name in manifest["files"])
        return present and all((out / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False
