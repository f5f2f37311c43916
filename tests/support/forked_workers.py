"""Workers forked from a process that has the large packages imported, where a test starts them to see what they do, and not
how they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from started_python import PACKAGES

from sdflow.passes.base import TRACES
from sdflow.processes import worker_group, worker_server, workers
from sdflow.processes.worker_server import WorkerServer
from sdflow.processes.workers import spawn


@pytest.fixture(scope="session")
def server_of_workers() -> Iterator[WorkerServer | None]:
    """None where processes are not forked."""
    if not worker_server.AVAILABLE:
        yield None
        return
    layers = (name for layer in TRACES for name in layer)
    server = WorkerServer((*PACKAGES, *layers), spawn, lambda worker: None)
    yield server
    server.end()


@contextmanager
def forking(server: WorkerServer | None) -> Iterator[None]:
    """What would be spawned is forked from the server: workers, and the servers of a run."""
    with pytest.MonkeyPatch.context() as patched:
        if server is not None:
            patched.setattr(workers, "spawn", server.fork)
            patched.setattr(worker_group, "spawn", server.fork)
        yield


@pytest.fixture
def forked_workers(server_of_workers: WorkerServer | None) -> Iterator[None]:
    """For a test alone: what fixtures of a wider scope start, they start with `forking`."""
    with forking(server_of_workers):
        yield
