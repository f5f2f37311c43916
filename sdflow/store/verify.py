"""Reading the whole cache again: every byte of every object, every action file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sdflow.store.layout import Layout, put_aside, reading
from sdflow.store.objects import AbsentObject, BadTree, find
from sdflow.store.records import BadRecord, load_action, read_record
from sdflow.store.stat_cache import StatCache


@dataclass(frozen=True)
class VerifyReport:
    """objects, actions, bytes: what was read and is sound. damaged: (path, what is wrong), now in quarantine; but for those
    in `stuck`, which could not be moved there."""

    objects: int
    actions: int
    bytes: int
    damaged: tuple[tuple[Path, str], ...]
    stuck: tuple[Path, ...] = ()


def verify(layout: Layout, stats: StatCache, progress: Callable[[str, int], None] | None = None) -> VerifyReport:
    """Hash everything again and put what is damaged aside. `progress` gets each object's digest and bytes when done.

    Raises CacheError if the cache cannot be read.
    """
    damaged: list[tuple[Path, str]] = []
    stuck: list[Path] = []
    actions_of: defaultdict[str, list[Path]] = defaultdict(list)
    sound_bytes = sound_objects = actions = 0
    with reading(layout.root):
        for path in sorted(layout.actions.glob("*/*.json")):
            try:
                stored = load_action(read_record(path))
                if layout.action(stored.action.digest) != path:
                    raise BadRecord("it belongs to another action")
            except FileNotFoundError:
                continue
            except BadRecord as error:
                damaged.append((path, str(error)))
                if not put_aside(layout, [path], str(error)):
                    stuck.append(path)
                continue
            actions_of[stored.object].append(path)
            actions += 1
        for path in sorted(layout.objects.glob("*/*")):
            try:
                artifact = find(layout, stats, path.name, anew=True)
            except AbsentObject:  # collected just now
                continue
            except BadTree as error:
                damaged.append((path, str(error)))
                actions -= len(actions_of[path.name])
                if not put_aside(layout, [path, *actions_of[path.name]], str(error)):
                    stuck.append(path)
                continue
            sound_objects += 1
            sound_bytes += artifact.bytes
            if progress:
                progress(path.name, artifact.bytes)
    return VerifyReport(sound_objects, actions, sound_bytes, tuple(damaged), tuple(stuck))
