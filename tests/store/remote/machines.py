"""Machines that share a remote: each a cache folder of its own; and servers, each a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.artifact import Action, Record
from sdflow.store import Cache
from sdflow.store.remote import RemoteSpec, catalog

from ..builds import contents, make_action, write_files

HERE = Path(__file__).parent
BUILT = {"seconds": 0.5, "peak_memory": 1000, "finished": "2026-01-01T00:00:00Z"}


@dataclass
class Machine:
    """A cache with a remote, and what it was told."""

    folder: Path
    url: str
    push: bool = True
    timeout: float = 20.0
    told: list[str] = field(default_factory=list)
    cuts: Any = None

    def __post_init__(self) -> None:
        self.again()

    def again(self) -> None:
        """A new process on the same cache."""
        cuts = {} if self.cuts is None else {"cuts": self.cuts}
        self.cache = Cache(self.folder, remote=RemoteSpec(self.url, self.push, self.timeout), **cuts)
        assert self.cache.remote is not None
        self.remote = self.cache.remote
        self.remote.tell = self.told.append

    def build(self, action: Action, files: dict[str, bytes] | None = None) -> Record:
        """As the executor does it: look up, fetch, build, offer."""
        with self.cache.lease(), self.cache.lock(action):
            record = self.cache.lookup(action) or self.cache.fetch(action)
            if record is None:
                with self.cache.staging(action) as staging:
                    write_files(staging.files, contents(action) if files is None else files)
                    record = staging.publish({"nodes": 3}, BUILT)
            self.cache.offer(record)
        return record

    def fetch(self, action: Action) -> Record | None:
        with self.cache.lock(action):
            return self.cache.fetch(action)

    def quarantined(self) -> list[str]:
        return [path.read_text() for path in self.folder.glob("v1/quarantine/*/reason.txt")]


def files_of(record: Record) -> dict[str, bytes]:
    root = record.artifact.path
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def require_a_round(url: str, one: Machine, other: Machine) -> None:
    """What one machine pushes, another fetches and finds listed; what is not there is a miss."""
    action = make_action("served")
    record = one.build(action)
    fetched = other.fetch(action)
    assert fetched is not None, other.told
    assert fetched.artifact.digest == record.artifact.digest
    assert files_of(fetched) == contents(action)
    assert other.fetch(make_action("not there")) is None
    assert one.told == [f"pushed 1 results to {url}: 20.3 kB sent, 0 B were there"]
    assert other.told == []
    (found,) = catalog.listed(other.remote.share)
    assert (found.entry.action, found.bytes) == (action, record.artifact.bytes)
    assert found.pushed is not None


@contextmanager
def server(script: str, *arguments: object) -> Iterator[int]:
    """A server of this folder as a process; gives its port."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


__all__ = ["BUILT", "Machine", "files_of", "make_action", "server"]
