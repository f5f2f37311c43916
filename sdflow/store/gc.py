"""Lists entries and collects garbage: least recently used first, never pinned or leased objects.

Collection deletes the action files, renames the object into the trash, then empties the trash. A process killed at any
moment leaves fewer entries and some rubbish for the next collection.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sdflow.disk.locked_folder import remove_abandoned_scratch
from sdflow.errors import CacheError
from sdflow.onnx_model.quantized import quantized_to
from sdflow.store.layout import Layout, move, put_aside, remove_tree, writing
from sdflow.store.locks import GUARD, held, leased, try_lock
from sdflow.store.objects import BadTree, actions, read_manifest
from sdflow.store.pins import pins, remove_abandoned_staging, tidy
from sdflow.store.records import BadRecord
from sdflow.store.stat_cache import StatCache

# For quarantine, failed builds and partial downloads; for temporary files, which live milliseconds.
KEEP_SECONDS, STRAY_SECONDS = 14 * 24 * 3600, 3600


@dataclass(frozen=True)
class Entry:
    """A finished action. Times are Unix seconds."""

    action: str
    object: str
    pass_name: str
    submodel: str
    published: float
    last_used: float
    bytes: int  # of its object, which other actions may share
    pinned_by: tuple[str, ...]
    structure: bool = False  # a graph without weights
    quantized: str = ""  # the type of quantized weights


@dataclass(frozen=True)
class GcReport:
    removed: tuple[Entry, ...] = ()
    orphans: int = 0  # objects without an action
    rubbish: int = 0  # leftovers of killed processes, expired quarantine, and trash
    bytes_freed: int = 0  # of objects
    bytes_kept: int = 0
    over: int = 0  # kept bytes above the limit, all in use


def entries(layout: Layout) -> Iterator[tuple[Path, Entry | BadRecord | BadTree]]:
    """Yield every action file with its entry, or with what is wrong with the file or its object."""
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
        except FileNotFoundError:  # deleted meanwhile
            continue
        except BadTree as error:
            yield path, error
            continue
        content = stored.action.content
        step = content.get("pass")
        measured = [stored.facts.get(name) for name in ("operators", "dtypes")]  # may be anything
        entry = Entry(
            action=stored.action.digest,
            object=stored.object,
            pass_name=str(step.get("name", "?")) if isinstance(step, dict) else "?",
            submodel=str(content.get("submodel", "?")),
            published=stored.published,
            last_used=used,
            bytes=sum(file.size for file in files),
            pinned_by=tuple(pinned_by[stored.object]),
            structure=content.get("weights") == "symbolic",
            quantized=quantized_to(*(each if isinstance(each, Mapping) else () for each in measured)) or "",
        )
        yield path, entry


def collect(layout: Layout, stats: StatCache, max_size: int | None, *, dry_run: bool) -> GcReport:
    """Remove rubbish, and entries until the objects take at most `max_size` bytes. Raises CacheError."""
    removed = 0
    if not dry_run:
        remove_abandoned_scratch()
    if not layout.is_ours():
        return GcReport()
    if not dry_run:
        layout.ensure()
        removed = remove_abandoned_staging(layout)
    with writing(layout.root), held(layout.lock("gc"), if_possible=dry_run):
        # Under the guard lock no lease is taken, so nothing is published while we decide and move.
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
    # Read leases before actions: a build that ends in between left its lease or its action.
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
            with suppress(FileNotFoundError):  # quarantined meanwhile
                move(layout.object(digest), layout.trash / f"{digest[:16]}-{time.time_ns()}")
    return GcReport(
        removed=tuple(removed),
        orphans=len(orphans),
        bytes_freed=sum(sizes[digest] for digest in doomed),
        bytes_kept=kept,
        over=max(0, kept - max_size) if max_size is not None else 0,
    )


def _worth(entries: Sequence[Entry]) -> tuple[bool, float]:
    """Eviction order: models with weights (seconds to rebuild from a graph) before structures (minutes), then LRU."""
    return any(entry.structure for entry in entries), max(entry.last_used for entry in entries)


def _size(directory: Path) -> int:
    total = 0
    for path in filter(Path.is_file, directory.rglob("*")):
        with suppress(FileNotFoundError):  # removed meanwhile
            total += path.stat().st_size
    return total


def _rubbish(layout: Layout) -> Iterator[Path]:
    """Yield trash, staging of dead processes, and expired quarantine, failed builds and partial downloads."""
    now = time.time()
    yield from layout.trash.glob("*")
    for path in (*layout.quarantine.glob("*"), *layout.incoming.glob("*")):
        with suppress(FileNotFoundError):  # completed and published meanwhile
            if path.lstat().st_mtime < now - KEEP_SECONDS:
                yield path
    for path in layout.staging.glob("*"):
        try:
            age = now - path.lstat().st_mtime
        except FileNotFoundError:
            continue
        if path.name.endswith("-failed"):
            gone = age > KEEP_SECONDS
        elif path.is_dir():  # a live process holds its lock
            lock = try_lock(path.with_name(f"{path.name}.lock"), if_possible=True)
            gone = lock is not None
            if lock is not None:
                lock.release()
        else:
            gone = path.suffix != ".lock" and age > STRAY_SECONDS
        if gone:
            yield path


def _remove_idle_locks(layout: Layout) -> None:
    """Remove lock files that nobody holds. A waiter (filelock) notices the removal and creates a new file."""
    for path in (*layout.locks.glob("*.lock"), *layout.staging.glob("*.lock")):
        if path.stem not in (GUARD, "gc", "stat"):
            lock = try_lock(path)
            if lock is not None:
                path.unlink(missing_ok=True)
                lock.release()


def clean(layout: Layout) -> None:
    """Empty the cache. Raises CacheError if the directory is not an sdflow cache or a run is using it."""
    if not layout.root.exists():
        return
    if not layout.is_ours():
        if not layout.foreign() and not layout.own.exists():
            return
        raise CacheError(
            "not an sdflow cache: its CACHEDIR.TAG is missing or belongs to another program",
            where=str(layout.root),
            remedy="Nothing was removed. Pass the cache folder, or delete this folder yourself.",
        )
    layout.ensure()
    with writing(layout.root), held(layout.lock("gc")), held(layout.lock(GUARD)):
        _, users = leased(layout)
        if users:
            raise CacheError(
                f"the cache is in use by process {', '.join(map(str, users))}",
                where=str(layout.root),
                remedy="Nothing was removed. Wait until it finishes.",
            )
        # Actions go first: without them, nothing else counts.
        remove_abandoned_staging(layout)
        doomed = [layout.actions, *layout.contents, layout.quarantine, layout.staging, layout.incoming]
        for path in (*doomed, layout.stat, Path(f"{layout.stat}-journal")):
            with suppress(FileNotFoundError):
                move(path, layout.trash / f"{path.name}-{time.time_ns()}")
        for path in layout.trash.glob("*"):
            remove_tree(path)
        _remove_idle_locks(layout)
        layout.ensure()
