"""What `sdflow serve --on` says without a cluster. The server on a real one: tests/on_ray/test_serve.py."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from sdflow.errors import UsageError
from sdflow.manifest import Manifest, Origin
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.settings import Settings
from sdflow.serve.jobs import Begun, Drawn, Stepped, Turned, WorkerOptions
from sdflow.serve.keys import Access
from sdflow.serve.limits import Limits
from sdflow.serve.on_ray import server
from sdflow.serve.on_ray.progress import Progress
from sdflow.serve.on_ray.server import serve_on_ray
from sdflow.serve.on_ray.spread import Spread, read_replicas, read_spread, with_gpus


@pytest.mark.parametrize(("text", "read"), [("2", (2, 2)), ("1:4", (1, 4)), ("3:3", (3, 3))])
def test_replicas_are_a_number_or_from_and_to(text: str, read: tuple[int, int]) -> None:
    assert read_replicas(text) == read


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:", ":3", "two", "-1", "0:2", "1:2:3", "²"])
def test_what_are_no_numbers_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of replicas"):
        read_replicas(text)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = Settings(Models({}), WorkerOptions({}), Access(), Limits(), Loras(None))
    with pytest.raises(UsageError, match="Ray is not installed") as raised:
        serve_on_ray(settings, "127.0.0.1", 8000, Spread("auto"))
    assert "sdflow[ray]" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((None, 8000, "2", None, None, False), "Add --on ray"),
        ((None, 8000, None, 0.5, None, False), "Add --on ray"),
        ((None, 8000, None, None, None, True), "Add --on ray"),
        (("ray", 0, None, None, None, False), "cannot pick a free port"),
        (("ray://head:10001", 8000, None, None, None, False), "from a node of the cluster"),
        (("mars", 8000, None, None, None, False), "is not a Ray cluster"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: tuple[Any, ...], told: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_spread(*options)
    assert told in str(raised.value)


def test_a_cluster_serves_no_https() -> None:
    with pytest.raises(UsageError, match="does not serve HTTPS"):
        read_spread("ray", 8000, None, None, None, False, tls=True)


def test_a_replica_gets_a_gpu_if_a_pipeline_needs_one() -> None:
    on_cpu, on_gpu = (Manifest(Origin(target, target), {}, ()) for target in ("cpu", "cuda"))
    assert with_gpus(Spread("auto"), None, [on_cpu]).gpus == 0
    assert with_gpus(Spread("auto"), None, [on_cpu, on_gpu]).gpus == 1
    assert with_gpus(Spread("auto"), 0.5, [on_gpu]).gpus == 0.5
    with pytest.raises(UsageError, match="without a GPU cannot run a pipeline for the target cuda"):
        with_gpus(Spread("auto"), 0.0, [on_gpu])


@pytest.mark.parametrize(
    ("target", "gpus"), [("tensorrt", 1), ("rocm", 1), ("nv_tensorrt_rtx", 1), ("windowsml", 0), ("webgpu", 0)]
)
def test_a_part_of_a_gpu_is_only_for_targets_whose_memory_is_limited(target: str, gpus: int) -> None:
    pipeline = Manifest(Origin(target, target), {}, ())
    assert with_gpus(Spread("auto"), None, [pipeline]).gpus == gpus
    assert with_gpus(Spread("auto"), 1.0, [pipeline]).gpus == 1
    with pytest.raises(UsageError, match=f"the target {target} cannot limit its device memory"):
        with_gpus(Spread("auto"), 0.5, [pipeline])


def test_a_port_of_something_that_does_not_speak_http_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(listening: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    connection.recv(4096)

    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=greet, args=(listening,), daemon=True).start()
        with pytest.raises(UsageError, match="another server answers at") as raised:
            server._require_answer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        listening.shutdown(socket.SHUT_RDWR)
    assert raised.value.where == "--port"


def test_options_of_a_cluster_are_read() -> None:
    assert read_spread(None, 8000, None, None, None, False) is None
    assert read_spread("ray", 8000, "1:4", 0.5, 2, True) == Spread("auto", 1, 4, 0.5, 2, True)


def test_a_replica_reports_four_times_a_second_and_loses_no_batch() -> None:
    """Every message through Ray costs the front a millisecond or two."""
    now = 0.0
    progress = Progress(lambda: now)
    passed, batches = [], []
    for step in range(1, 21):
        now = step * 0.05
        passed += [each for each in ("a", "b") if progress.due(Stepped(each, 0, step, 20))]
        if (report := progress.turned(Turned(((2, 2, 0.05),), 2, 1, 7), True)) is not None:
            batches += report.batches
            assert (report.drawing, report.waiting, report.memory) == (2, 1, 7)
    assert passed == ["a", "b"] * 4
    assert 0 < len(batches) < 20
    for ending in (Begun("a", 0), Drawn("a", 0, b"", (1, 1), None, {})):
        assert progress.due(ending)
    assert progress.turned(Turned((), 0, 0), False) is None, "nobody would hear of them"
    last = progress.turned(Turned((), 0, 0), True)
    assert last is not None
    assert len(batches) + len(last.batches) == 20
    progress.ended("a")
    assert progress.due(Stepped("a", 0, 1, 20))
    assert not progress.due(Stepped("b", 0, 20, 20))
