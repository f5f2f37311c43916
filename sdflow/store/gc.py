"""What the cache holds, and how it shrinks: least recently used first, never what is pinned or in use.

Nothing is deleted in place: the action files go, then the object is renamed into the trash, then the trash is emptied.
Killed at any moment, the cache has fewer entries and some rubbish for the next collection.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow.disk.locked_folder import remove_abandoned_scratch
from sdflow.errors import CacheError
from sdflow.onnx_model.quantized import quantized_to
from sdflow.store.layout import Layout, move, put_aside, remove_tree, writing
from sdflow.store.locks import GUARD, held, leased, try_lock
from sdflow.store.objects import BadTree, actions, read_manifest
from sdflow.store.pins import pins, remove_abandoned_staging, tidy
from sdflow.store.records import BadRecord
from sdflow.store.stat_cache import StatCache

KEEP_SECONDS, STRAY_SECONDS = 14 * 24 * 3600, 3600
"""How long damaged entries, kept failures, and what came half from a remote cache stay; and temporary files, which live for
milliseconds."""


@dataclass(frozen=True)
class Entry:
    """A finished action. Times in seconds since 1970; `bytes` are its object's, which other actions may share. structure: a graph
    without weights. quantized: the type that weights are quantized to, or ""."""

    action: str
    object: str
    pass_name: str
    submodel: str
    published: float
    last_used: float
    bytes: int
    pinned_by: tuple[str, ...]
    structure: bool = False
    quantized: str = ""


@dataclass(frozen=True)
class GcReport:
    """removed: entries that went. orphans: objects that no action named. rubbish: leftovers of killed processes, old
    quarantine and trash. bytes_freed, bytes_kept: of objects. over: kept bytes beyond the limit, being in use."""

    removed: tuple[Entry, ...] = ()
    orphans: int = 0
    rubbish: int = 0
    bytes_freed: int = 0
    bytes_kept: int = 0
    over: int = 0


def entries(layout: Layout) -> Iterator[tuple[Path, Entry | BadRecord | BadTree]]:
    """Every action file, with its entry or what is wrong with it or with its object."""
    pinned_by = defaultdict(list)
    for pin in pins(layout):
        for digest in pin.objects:
            pinned_by[digest].append(pin.name)
    for path, stored in actions(layout):
        if isinstance(stored, BadRecord):
            yield path, stored
            continue
        try:
            used = path.stat().st_mtime
            files = read_manifest(layout.object(stored.object), stored.object)
        except FileNotFoundError:  # forgotten just now
            continue
        except BadTree as error:
            yield path, error
            continue
        content = stored.action.content
        step = content.get("pass")
        yield (
            path,
            Entry(
                action=stored.action.digest,
                object=stored.object,
                pass_name=str(step.get("name", "?")) if isinstance(step, dict) else "?",
                submodel=str(content.get("submodel", "?")),
                published=stored.published,
                last_used=used,
                bytes=sum(file.size for file in files),
                pinned_by=tuple(pinned_by[stored.object]),
                structure=content.get("weights") == "symbolic",
                quantized=_quantized(stored.facts),
            ),
        )


def _quantized(facts: Mapping[str, Any]) -> str:
    """By what a step measured of its graph; facts may be anything."""
    found = [facts.get(name) for name in ("operators", "dtypes")]
    return quantized_to(*(each if isinstance(each, Mapping) else () for each in found)) or ""


def collect(layout: Layout, stats: StatCache, max_size: int | None, *, dry_run: bool) -> GcReport:
    """Remove rubbish and, until the objects take at most `max_size` bytes, entries. Raises CacheError."""
    removed = 0
    if not dry_run:
        remove_abandoned_scratch()
    if not layout.is_ours():
        return GcReport()
    if not dry_run:
        layout.ensure()
        removed = remove_abandoned_staging(layout)
    with writing(layout.root), held(layout.lock("gc"), if_possible=dry_run):
        # No lease is taken, and so nothing published, while we decide and move.
        with held(layout.lock(GUARD), if_possible=dry_run):
            if not dry_run:
                tidy(layout)
            report = _collect_objects(layout, max_size, dry_run=dry_run)
        rubbish = list(_rubbish(layout))
        if not dry_run:
            for path in rubbish:
                remove_tree(path)
            _remove_idle_locks(layout)
            stats.prune()
    return replace(report, rubbish=len(rubbish) + removed)


def _collect_objects(layout: Layout, max_size: int | None, *, dry_run: bool) -> GcReport:
    # Leases are read before actions: a build that ends in between has left either its lease or its action.
    protected = leased(layout, tidy=not dry_run)[0] | {digest for pin in pins(layout) for digest in pin.objects}
    by_object: defaultdict[str, list[Entry]] = defaultdict(list)
    for path, entry in entries(layout):
        if isinstance(entry, Entry):
            by_object[entry.object].append(entry)
        elif not dry_run:
            put_aside(layout, [path], str(entry)) if isinstance(entry, BadRecord) else path.unlink(missing_ok=True)
    sizes = {path.name: _size(path) for path in layout.objects.glob("*/*")}
    orphans = [digest for digest in sizes if digest not in by_object and digest not in protected]
    doomed = list(orphans)
    kept = sum(sizes.values()) - sum(sizes[digest] for digest in orphans)
    if max_size is not None:
        for digest in sorted(by_object, key=lambda digest: _worth(by_object[digest])):
            if kept <= max_size:
                break
            if digest not in protected:
                doomed.append(digest)
                kept -= sizes[digest]
    removed = [entry for digest in doomed for entry in by_object.get(digest, ())]
    if not dry_run:
        for entry in removed:
            layout.action(entry.action).unlink(missing_ok=True)
        for digest in doomed:
            with suppress(FileNotFoundError):  # moved to quarantine just now
                move(layout.object(digest), layout.trash / f"{digest[:16]}-{time.time_ns()}")
    return GcReport(
        removed=tuple(removed),
        orphans=len(orphans),
        bytes_freed=sum(sizes[digest] for digest in doomed),
        bytes_kept=kept,
        over=max(0, kept - max_size) if max_size is not None else 0,
    )


def _worth(entries: Sequence[Entry]) -> tuple[bool, float]:
    """What goes first: models with weights, which a graph gives again in seconds, before the small graphs, which took
    minutes; of each, what was used least recently."""
    return any(entry.structure for entry in entries), max(entry.last_used for entry in entries)


def _size(directory: Path) -> int:
    """Bytes of all files in a directory; what vanishes meanwhile counts nothing."""
    total = 0
    for path in filter(Path.is_file, directory.rglob("*")):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _rubbish(layout: Layout) -> Iterator[Path]:
    """The trash, what dead processes left in staging, and damaged entries and failures kept long enough."""
    now = time.time()
    yield from layout.trash.glob("*")
    for path in (*layout.quarantine.glob("*"), *layout.incoming.glob("*")):
        with suppress(FileNotFoundError):  # it came whole meanwhile, and was published
            if path.lstat().st_mtime < now - KEEP_SECONDS:
                yield path
    for path in layout.staging.glob("*"):
        try:
            age = now - path.lstat().st_mtime
        except FileNotFoundError:
            continue
        if path.name.endswith("-failed"):
            gone = age > KEEP_SECONDS
        elif path.is_dir():  # its lock is held as long as its process lives
            lock = try_lock(path.with_name(f"{path.name}.lock"), if_possible=True)
            gone = lock is not None
            if lock is not None:
                lock.release()
        else:
            gone = path.suffix != ".lock" and age > STRAY_SECONDS
        if gone:
            yield path


def _remove_idle_locks(layout: Layout) -> None:
    """Lock files that nobody holds. Who waits on one that goes sees it and takes a new one (filelock looks)."""
    for path in (*layout.locks.glob("*.lock"), *layout.staging.glob("*.lock")):
        if path.stem not in (GUARD, "gc", "stat"):
            lock = try_lock(path)
            if lock is not None:
                path.unlink(missing_ok=True)
                lock.release()


def clean(layout: Layout) -> None:
    """Empty the cache. Raises CacheError if the directory is not a cache of ours or a run is using it."""
    if not layout.root.exists():
        return
    if not layout.is_ours():
        if not layout.foreign() and not layout.own.exists():
            return
        raise CacheError(
            "this is not a cache of sdflow: its CACHEDIR.TAG is missing or another program's",
            where=str(layout.root),
            remedy="Nothing was removed. Give the cache folder, or remove this one by hand if it is what you mean.",
        )
    layout.ensure()
    with writing(layout.root), held(layout.lock("gc")), held(layout.lock(GUARD)):
        _, users = leased(layout)
        if users:
            raise CacheError(
                f"the cache is in use by process {', '.join(map(str, users))}",
                where=str(layout.root),
                remedy="Nothing was removed. Wait until it ends.",
            )
        # The actions first: from then on nothing of the rest counts.
        remove_abandoned_staging(layout)
        doomed = [layout.actions, *layout.contents, layout.quarantine, layout.staging, layout.incoming]
        for path in (*doomed, layout.stat, Path(f"{layout.stat}-journal")):
            with suppress(FileNotFoundError):
                move(path, layout.trash / f"{path.name}-{time.time_ns()}")
        for path in layout.trash.glob("*"):
            remove_tree(path)
        _remove_idle_locks(layout)
        layout.ensure()
