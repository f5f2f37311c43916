"""Fixtures of the whole test suite; nothing that runs in it may reach the network or report anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

os.environ.update(
    CI="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    OLIVE_DISABLE_TELEMETRY="1",
    ORT_DISABLE_TELEMETRY="1",
)

# Workers run side by side; more threads than cores slow a small model down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the core that they wait for

from converted import converted  # noqa: F401
from small_workflows import bench, chain  # noqa: F401
from tiny_pipeline import tiny_artifacts, tiny_checkpoint, tiny_pipeline, tiny_torch  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def digests_of_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `generate` notes of the files that it read lies in the tests' own folder."""
    os.environ["SDFLOW_DIGESTS"] = str(tmp_path_factory.mktemp("digests"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that the test starts end at SIGINT, also where the shell ignores it for what it runs (`nohup`, `&`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def children() -> Callable[..., list[psutil.Process]]:
    """Asks for the processes that this one has started since the test began. Earlier ones stay: torch.compile keeps a pool,
    multiprocessing a tracker."""
    me = psutil.Process()
    before = set(me.children(recursive=True))

    def since(recursive: bool = False) -> list[psutil.Process]:
        return [each for each in me.children(recursive=recursive) if each not in before]

    return since
