"""A real Ray cluster of several nodes, each with processes of its own, on this machine. `pip install 'sdflow[ray]'`"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "memory": 2_000_000_000, "object_store_memory": 80_000_000}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "180000",  # of a machine that does other work too
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def free_port() -> int:
    """Below those that the system and Ray give to others; Ray Serve and Ray's client server find none by themselves."""
    for port in range(8100, 9900):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that runs no steps, and two nodes of one core each."""
    pytest.importorskip("ray", reason="pip install 'sdflow[ray]'")
    folder = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**SETTINGS, "TMPDIR": str(folder)}.items():
            patched.setenv(name, value)
        from ray.cluster_utils import Cluster

        port = free_port()
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
        made = Cluster(initialize_head=True, head_node_args=head)
        made.client = f"ray://127.0.0.1:{port}"
        try:
            for _ in range(2):
                made.add_node(**NODE)
            made.traces = folder / "ran"
            yield made
        finally:
            made.shutdown()
