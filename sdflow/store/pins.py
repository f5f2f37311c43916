"""Pins protect the objects that assembled pipelines use from garbage collection.

A pin is written before its pipeline is moved into place, and counts while the pipeline's sdflow.json exists: at its
path, at the same path relative to the cache (the project moved), or anywhere on the file system (the pipeline moved;
the pin keeps a hardlink). Collection also protects what pipelines in the known output folders, and beside pinned ones,
link to. A pipeline without a readable sdflow.json is recognized by its model_index.json or its links; its pin lists the
files that sdflow put there, so rebuilding the folder does not delete the user's own files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import INDEX_FILE
from sdflow.digest import digest_json
from sdflow.disk.input_file import read_input
from sdflow.disk.locked_folder import remove_abandoned
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, NewerManifest, read_manifest
from sdflow.store.layout import Layout, log, replace_file
from sdflow.store.records import BadRecord, dump, load, read_record

STAGING = ".*.sdflow-staging"
_SECOND_NAME = ".manifest"


@dataclass(frozen=True)
class Pin:
    """The objects of one pipeline. folder: its path; None pins forever. files: POSIX paths of all files put there."""

    name: str
    folder: Path | None
    objects: tuple[str, ...]
    files: tuple[str, ...] = ()


def write_pin(layout: Layout, pin: Pin, described: Path | None) -> None:
    """Write a pin durably, unless the same pin exists. described: the folder with the pipeline's sdflow.json now: its
    own or its staging folder. Raises OSError."""
    manifest = _digest(described / MANIFEST_FILE) if described is not None else None
    identity = digest_json([str(pin.folder) if pin.folder else pin.name, manifest])[:16]
    path = layout.pins / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', pin.name)[:40]}-{identity}.json"
    content = dump(
        {
            "format": 2,
            "name": pin.name,
            "objects": sorted(set(pin.objects)),
            "manifest": manifest,
            "files": sorted(pin.files),
            "index": None if described is None else _digest(described / INDEX_FILE),
            **_place(layout, pin.folder),
        }
    )
    if described is not None:
        link, source = path.with_suffix(_SECOND_NAME), described / MANIFEST_FILE
        try:
            if not (link.exists() and link.samefile(source)):
                link.unlink(missing_ok=True)
                link.hardlink_to(source)
        except OSError as error:  # a file system without hardlinks
            log.debug("no hardlink to %s: %s", source, error)
    if _digest(path) != hashlib.sha256(content).hexdigest():
        replace_file(layout, path, content, durable=True)
    for other in layout.pins.glob(f"*-{identity}.json"):  # the same pipeline under its former name
        if other != path:
            other.unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    with suppress(OSError):
        return hashlib.sha256(read_input(path)).hexdigest()
    return None


@dataclass(frozen=True)
class _Record:
    path: Path
    body: Mapping[str, Any]
    places: tuple[Path, ...]  # where its folder may be


def _records(layout: Layout, folder: Path) -> Iterator[_Record]:
    for path in sorted(folder.glob("*.json")):
        try:
            body = load(read_record(path))
        except FileNotFoundError:
            continue
        except (BadRecord, OSError) as error:
            log.warning("%s is ignored: %s; assemble the pipeline again to protect its cache entries", path, error)
            continue
        places = [Path(body["folder"])] if body.get("folder") else []
        if body.get("relative"):
            places.append(Path(os.path.normpath(layout.root.absolute() / body["relative"])))
        yield _Record(path, body, tuple(dict.fromkeys(places)))


def _place(layout: Layout, folder: Path | None) -> dict[str, str | None]:
    relative = None
    with suppress(ValueError):  # Windows: another drive
        relative = os.path.relpath(folder, layout.root.absolute()) if folder else None
    return {"folder": str(folder) if folder else None, "relative": relative}


def _counts(layout: Layout, pin: _Record) -> bool:
    """Return whether the pinned pipeline still exists: at one of its places, or moved within the file system."""
    with suppress(OSError):
        if pin.path.with_suffix(_SECOND_NAME).stat().st_nlink > 1:
            return True
    manifest = pin.body.get("manifest")
    return not pin.places or any(
        place.exists()
        and (manifest is None or _digest(place / MANIFEST_FILE) == manifest or _is_left(layout, place, pin.body))
        for place in pin.places
    )


def _is_left(layout: Layout, place: Path, body: Mapping[str, Any]) -> bool:
    """Return whether a folder without a readable sdflow.json is the pinned pipeline."""
    try:
        read_manifest(place)
    except NewerManifest:
        return False
    except UsageError:
        index = body.get("index")
        same = index is not None and _digest(place / INDEX_FILE) == index
        return same or not linked_objects(layout, place).isdisjoint(body["objects"])
    return False


def files_put(layout: Layout, folder: Path) -> frozenset[str] | None:
    """Return the POSIX paths that sdflow put into a folder without a readable sdflow.json; None if no pin proves it."""
    pins = [pin for pin in _records(layout, layout.pins) if folder in pin.places and _is_left(layout, folder, pin.body)]
    return frozenset(name for pin in pins for name in pin.body.get("files", ())) if pins else None


def pins(layout: Layout) -> list[Pin]:
    """Return the pins that count, plus a pin for every unpinned link of a pipeline in the known folders."""
    found: list[Pin] = []
    parents = list(output_folders(layout))
    for pin in _records(layout, layout.pins):
        parents += [place.parent for place in pin.places]
        if _counts(layout, pin):
            folder = next((place for place in pin.places if place.exists()), pin.places[0] if pin.places else None)
            found.append(Pin(pin.body["name"], folder, tuple(pin.body["objects"])))
    pinned = {(pin.folder, digest) for pin in found for digest in pin.objects}
    for parent in dict.fromkeys(parents):
        folders: list[Path] = []
        with suppress(OSError):
            folders = [path for path in sorted(parent.iterdir()) if (path / MANIFEST_FILE).is_file()]
        for folder in folders:
            objects = [digest for digest in sorted(linked_objects(layout, folder)) if (folder, digest) not in pinned]
            found += [Pin(folder.name, folder, tuple(objects))] if objects else []
    return found


def linked_objects(layout: Layout, folder: Path) -> set[str]:
    """Return the objects of this cache that a folder links to; they may be missing."""
    objects = layout.objects.resolve()
    found = set()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                target = Path(os.path.realpath(entry.path))
                if target.is_relative_to(objects) and len(target.relative_to(objects).parts) > 1:
                    found.add(target.relative_to(objects).parts[1])
    return found


def note_output_folder(layout: Layout, folder: Path) -> None:
    """Record a folder of pipelines: `gc` removes what killed runs left there. Raises OSError."""
    path = layout.outputs / f"{digest_json(str(folder))[:32]}.json"
    if not path.is_file():
        replace_file(layout, path, dump({"format": 1, **_place(layout, folder)}), durable=True)


def output_folders(layout: Layout) -> list[Path]:
    return [place for noted in _records(layout, layout.outputs) for place in noted.places if place.is_dir()]


def remove_abandoned_staging(layout: Layout) -> int:
    return sum(remove_abandoned(folder, STAGING) for folder in dict.fromkeys(output_folders(layout)))


def tidy(layout: Layout) -> None:
    """Delete the pins that no longer count and the records of missing folders."""
    for pin in _records(layout, layout.pins):
        if not _counts(layout, pin):
            for each in (pin.path, pin.path.with_suffix(_SECOND_NAME)):
                each.unlink(missing_ok=True)
    for noted in _records(layout, layout.outputs):
        if not any(place.is_dir() for place in noted.places):
            noted.path.unlink(missing_ok=True)
