"""Steps on a real Ray cluster of several nodes, each with processes of its own, on this machine: what is built, and what is
lost with a node, a driver or a connection. `pip install 'sdflow[ray]'`; pytest -m slow tests/on_ray
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_ray.conftest import NODE, SETTINGS
from small_workflows import Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Driver:
    """Runs `sdflow run --on ray` on the cluster, in a process of its own."""

    def __init__(self, bench: Bench, cluster: Any) -> None:
        self.folder, self.cluster = bench.folder, cluster
        self.environment = {**os.environ, **SETTINGS, "RAY_ADDRESS": cluster.address, "TMPDIR": str(bench.folder)}

    def start(self, workflow: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sdflow", "run", str(workflow), "--on", "ray", "--no-verify", *arguments]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True)

    def run(self, workflow: Path, *arguments: str) -> tuple[int, str]:
        process = self.start(workflow, *arguments)
        told = process.communicate()[1]
        return process.returncode, told

    def ran(self) -> list[str]:
        """The passes that ran on the nodes since the last call, and their lines in order."""
        found = sorted(self.cluster.traces.iterdir()) if self.cluster.traces.exists() else []
        for path in found:
            path.unlink()
        return [path.name.split("-")[0] for path in found]

    def wait_for(self, traces: int) -> None:
        """Until so many passes have begun."""
        end = time.monotonic() + 300
        while not self.cluster.traces.exists() or len(list(self.cluster.traces.iterdir())) < traces:
            assert time.monotonic() < end, "no pass began on a node"
            time.sleep(0.1)


@pytest.fixture
def driver(bench: Bench, cluster: Any) -> Driver:
    made = Driver(bench, cluster)
    made.ran()
    return made


def matrix(bench: Bench, chain: Callable[..., list[dict[str, Any]]], **options: Any) -> Path:
    """Two targets of six models, three steps each. Nothing depends on the target, and what the first pass writes is the same for
    all models: six times the first step, and once each of the others."""
    models = [f"synthetic:sd15-tiny?seed={seed}" for seed in range(6)]
    axes = {"model": models, "target": ["cpu", "cuda"]}
    return bench.workflow(chain(**options), matrix=axes, verify=False)


RAN = ["Append"] * 2 + ["Convert"] * 6


def objects(cache: Path) -> set[str]:
    return {path.name for path in (cache / "v1/objects").iterdir()}


def test_a_matrix_gives_what_it_gives_here_and_a_second_run_executes_nothing(
    bench: Bench, driver: Driver, chain: Callable[..., list[dict[str, Any]]]
) -> None:
    path = matrix(bench, chain)
    status, told = driver.run(path)
    assert status == 0, told
    assert driver.ran() == RAN
    here = [sys.executable, "-m", "sdflow", "run", str(path), "--no-verify", "--cache", "here", "--out", "made_here"]
    subprocess.run(here, cwd=bench.folder, env=driver.environment, check=True, capture_output=True)
    assert objects(bench.folder / "cache") == objects(bench.folder / "here")
    shutil.rmtree(bench.folder / "ran")
    status, told = driver.run(path)
    assert (status, driver.ran()) == (0, []), told
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_what_a_lost_node_was_doing_is_done_elsewhere(
    bench: Bench,
    driver: Driver,
    cluster: Any,
    chain: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(cluster.traces.parent))
    lost = cluster.add_node(**NODE, resources={"lost": 1})
    process = driver.start(matrix(bench, chain, sleep=15))
    driver.wait_for(3)  # one on each node
    cluster.remove_node(lost, allow_graceful=False)
    told = process.communicate()[1]
    assert process.returncode == 0, told
    assert "its node was lost" in told
    assert len(objects(bench.folder / "cache")) == 3
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_a_killed_driver_leaves_a_cache_from_which_the_next_run_goes_on(
    bench: Bench, driver: Driver, chain: Callable[..., list[dict[str, Any]]]
) -> None:
    path = matrix(bench, chain, sleep=2)
    process = driver.start(path)
    driver.wait_for(4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, told = driver.run(path)
    assert status == 0, told
    kept = len(RAN) - len([line for line in told.splitlines() if "built in" in line])
    assert kept > 0, "what the killed run had published is not built again"
    assert len(objects(bench.folder / "cache")) == 3
    collect = [sys.executable, "-m", "sdflow", "cache", "gc"]
    subprocess.run(collect, cwd=bench.folder, env=driver.environment, check=True, capture_output=True)
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_two_drivers_at_once_build_every_step_once(
    bench: Bench, driver: Driver, chain: Callable[..., list[dict[str, Any]]]
) -> None:
    path = matrix(bench, chain)
    both = [driver.start(path, "--out", f"out{index}") for index in range(2)]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert driver.ran() == RAN


def test_a_pass_that_fails_on_a_node_is_told_as_here(
    bench: Bench, driver: Driver, chain: Callable[..., list[dict[str, Any]]]
) -> None:
    path = bench.workflow(chain(1, fail=True), verify=False)
    status, told = driver.run(path)
    assert status == 3
    assert "told to fail" in told
    assert "Traceback" not in told
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_one_signal_ends_the_driver_and_its_passes_on_the_nodes(
    bench: Bench, driver: Driver, chain: Callable[..., list[dict[str, Any]]], interruptible: None
) -> None:
    process = driver.start(bench.workflow(chain(sleep=600), verify=False))
    driver.wait_for(1)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    end = time.monotonic() + 60
    while any(
        "sdflow.passes.worker" in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < end, "the pass goes on"
        time.sleep(0.2)


def test_a_full_object_store_holds_no_step_up(
    bench: Bench, driver: Driver, cluster: Any, chain: Callable[..., list[dict[str, Any]]]
) -> None:
    fill = (
        "import ray, numpy, sys, time\n"
        "ray.init(address='auto', log_to_driver=False)\n"
        "kept = [ray.put(numpy.zeros(10_000_000, numpy.uint8)) for _ in range(7)]\n"
        "print('full', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", fill], env=driver.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        status, told = driver.run(matrix(bench, chain))
        assert status == 0, told
    finally:
        process.kill()
        process.communicate()
