"""Share engines through the remote cache, so machines of the same kind fetch them instead of compiling.

An engine is an entry of the remote cache (`sdflow.store.remote`) whose action is its key: the machine (device, driver,
versions) and the model (graph, weights, options, shapes). Machines therefore never request each other's incompatible
engines. All digests are verified on arrival, and signatures if signers are trusted.

Engines are code that the driver executes. A process only fetches them automatically if $SDFLOW_ENGINES_TRUST names
trusted signers.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sdflow import stop
from sdflow.artifact import Action, Record
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.user_folder import writing
from sdflow.errors import SdflowError, TargetUnavailableError
from sdflow.machine.plugins import plugins_of
from sdflow.machine.providers import onnxruntime_for
from sdflow.runtime.sessions.engine_cache import (
    FOLDER_VARIABLE,
    MACHINE_FILE,
    MODEL_FILE,
    keeps_engines,
    key_file,
    machine_folder,
    machine_key,
    model_name,
    read_key,
)
from sdflow.store import Cache
from sdflow.store.copying import answering, copy_entries
from sdflow.store.records import Stored
from sdflow.store.remote.catalog import listed
from sdflow.store.remote.spec import RemoteSpec, remote_from_environment
from sdflow.store.signing import signer_from_environment
from sdflow.targets import TARGETS

TRUST_VARIABLE = "SDFLOW_ENGINES_TRUST"
ANYBODY = "anybody"
"""Value of the variable that also accepts unsigned engines."""
ON_THE_WAY = "on-the-way"
"""Folder, next to the machines', for engines in transfer."""
_KIND = "engine"
_FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """The result of pushing or pulling engines.

    engines: number copied. there: already on the other side. others: of other machines, skipped.
    """

    engines: int
    there: int
    others: int = 0


def engine_action(machine: Mapping[str, Any], model: Mapping[str, Any]) -> Action:
    """Return the key of a machine's engines of one model."""
    return Action({_KIND: _FORMAT, "machine": dict(machine), "model": dict(model)})


def has_engines(folder: Path) -> bool:
    """Whether a provider has stored anything in a model's folder."""
    return folder.is_dir() and any(_compiled(folder))


def remote_of_engines(environment: Mapping[str, str] = os.environ) -> RemoteSpec | None:
    """Return the remote cache to fetch engines from automatically, or None if the environment names no trusted
    signers."""
    trust = trust_from_environment(environment)
    spec = None if trust is None else remote_from_environment(None, environment)
    return None if spec is None or trust is None else replace(spec, trust=trust)


def trust_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Return the trusted signers, as in `RemoteSpec.trust` (empty: anybody), or None if the environment names none."""
    said = environment.get(TRUST_VARIABLE, "").split()
    if not said:
        return None
    return () if ANYBODY in said else tuple(said)


def passing_through(root: Path, remote: RemoteSpec) -> Cache:
    """Return the cache that engines pass through in transfer."""
    return Cache(root / ON_THE_WAY, remote=remote, signer=signer_from_environment())


def fetch_engines(folder: Path, remote: RemoteSpec) -> bool:
    """Fetch the engines of a model's folder from the remote, if it has them and the folder is empty.

    Never fails: the provider compiles what is missing, and the log gives the reason.
    """
    key = _key_of(folder)
    if key is None or has_engines(folder):
        return False
    root = folder.parent.parent
    try:
        cache = passing_through(root, remote)
        with _passage(cache):
            for record in copy_entries(cache, [engine_action(*key)], up=False).new:
                _settle(record, root)
                log.info("%s: engines fetched from %s", folder.name, remote.shown)
    except SdflowError as error:
        log.warning("cannot fetch engines from %s: %s", remote.shown, error)
        return False
    return has_engines(folder)


def push_folder(folder: Path, remote: RemoteSpec) -> bool:
    """Push the engines of a model's folder if pushing is enabled. Never fails, like `fetch_engines`."""
    if not remote.push or not has_engines(folder):
        return False
    try:
        return push_engines(folder.parent.parent, remote, [folder]).engines > 0
    except SdflowError as error:
        log.warning("cannot push engines to %s: %s", remote.shown, error)
        return False


def push_engines(root: Path, remote: RemoteSpec, only: Sequence[Path] | None = None) -> Moved:
    """Push all engines under `root` to the remote, of any machine. only: restrict to these models' folders.

    Raises CacheError if the remote is unusable, UsageError if a folder is not writable.
    """
    cache = passing_through(root, remote)
    folders = (
        [each for machine in sorted(root.glob("*-*")) for each in sorted(machine.iterdir())] if only is None else only
    )
    moved = there = 0
    for folder in folders:
        key = _key_of(folder)
        if key is None or not has_engines(folder):
            continue
        stop.check()
        action = engine_action(*key)
        # If two processes push the same engine, the second waits, since each one removes its copy at the end.
        with _passage(cache), cache.lock(action, meanwhile=stop.check):
            with cache.staging(action) as staging:
                for name in _compiled(folder):
                    _copy(folder / name, staging.files / name)
                staging.publish({}, when_built(folder))
            try:
                if copy_entries(cache, [action], up=True).sent.results:
                    moved += 1
                elif cache.lookup(action) is not None:  # so it was not damaged in transfer
                    there += 1
            finally:
                cache.forget(action)
    return Moved(moved, there)


def pull_engines(root: Path, remote: RemoteSpec, machines: Sequence[Mapping[str, Any]]) -> Moved:
    """Fetch all engines that the remote has for these machine keys. Raises like `push_engines`."""
    cache = passing_through(root, remote)
    with answering(cache.remote) as there:
        entries = [entry for each in listed(there.share, stop.check) if _is_engine(entry := each.entry)]
    mine = [entry.action for entry in entries if entry.action.content["machine"] in machines]
    missing = [action for action in mine if not has_engines(_folder(root, action))]
    new = 0
    for action in missing:  # one at a time: they are large
        with _passage(cache):
            for record in copy_entries(cache, [action], up=False).new:
                _settle(record, root)
                new += 1
    return Moved(new, len(mine) - len(missing), len(entries) - len(mine))


def clear_on_the_way(root: Path) -> None:
    """Remove leftovers of killed processes; transfers in progress are unaffected. Raises CacheError if that fails."""
    if (root / ON_THE_WAY).is_dir():
        Cache(root / ON_THE_WAY).gc(0)


def machines_here() -> list[dict[str, Any]]:
    """Return this machine's keys, one for each available provider that stores engines."""
    found = []
    for target in filter(keeps_engines, TARGETS.values()):
        with suppress(TargetUnavailableError):
            ort, provider = onnxruntime_for(target)
            devices = plugins_of(ort, target).devices.get(provider, [])
            found.append(machine_key(provider, devices[0] if devices else None))
    return found


def _is_engine(entry: Stored) -> bool:
    content = entry.action.content
    return (
        content.keys() == {_KIND, "machine", "model"}
        and content[_KIND] == _FORMAT
        and all(isinstance(content[name], dict) for name in ("machine", "model"))
        and isinstance(content["machine"].get("provider"), str)
        and content["machine"]["provider"].isalnum()
    )


def _folder(root: Path, action: Action) -> Path:
    return machine_folder(root, action.content["machine"]) / model_name(action.content["model"])


def _key_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return machine key and model key of a model's folder, or None if it is not at the place its keys determine."""
    machine, model = read_key(folder.parent / MACHINE_FILE), read_key(folder / MODEL_FILE)
    if not isinstance(machine, dict) or not isinstance(model, dict) or "provider" not in machine:
        return None
    root = folder.parent.parent
    return (machine, model) if machine_folder(root, machine) / model_name(model) == folder.absolute() else None


def _compiled(folder: Path) -> list[str]:
    """Return a provider's files relative to the folder, without unfinished ones."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    names = [path.relative_to(folder).as_posix() for path in found]
    return [name for name in names if _is_compiled(name)]


def when_built(folder: Path) -> dict[str, Any]:
    """Return an entry's build record, of which only the time is known."""
    last = max((folder / name).stat().st_mtime for name in _compiled(folder))
    return {
        "seconds": 0.0,
        "peak_memory": 0,
        "finished": datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds"),
    }


def _is_compiled(name: str) -> bool:
    return name != MODEL_FILE and not any(part.startswith(".") for part in name.split("/"))


def _settle(record: Record, root: Path) -> None:
    """Move a fetched entry into place. Files that another process created meanwhile are kept."""
    folder = _folder(root, record.action)
    with writing("engines", root, FOLDER_VARIABLE):
        scratch = folder.parent / f".{folder.name}-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            for entry in filter(lambda each: _is_compiled(each.path), record.artifact.files):
                _copy(record.artifact.path / entry.path, scratch / entry.path)
            for path, content in (
                (folder.parent / MACHINE_FILE, record.action.content["machine"]),
                (folder / MODEL_FILE, record.action.content["model"]),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    write_whole(path, key_file(content))
            for each in scratch.iterdir():
                with suppress(OSError):  # another process was first
                    each.rename(folder / each.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


@contextmanager
def _passage(cache: Cache) -> Iterator[None]:
    """Protect an engine's transfer through the cache from other processes, and remove it at the end in any case."""
    try:
        with cache.lease():
            yield
    except BaseException:
        with suppress(SdflowError):  # the first error is raised
            cache.gc(0)
        raise
    cache.gc(0)
