"""Workers forked from a process that has the large packages imported, where a test starts them to see what they do, and not
how they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from started_python import StartedPython

from sdflow.processes import worker_group, workers


@contextmanager
def forking(started: StartedPython | None) -> Iterator[None]:
    """What would be spawned is forked: workers, and the servers of a run."""
    with pytest.MonkeyPatch.context() as patched:
        if started is not None:
            patched.setattr(workers, "spawn", started.line.spawn)
            patched.setattr(worker_group, "spawn", started.line.spawn)
        yield


@pytest.fixture
def forked_workers(started_python: StartedPython | None) -> Iterator[None]:
    """For a test alone: what fixtures of a wider scope start, they start with `forking`."""
    with forking(started_python):
        yield
