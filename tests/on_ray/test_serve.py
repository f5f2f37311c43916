"""The server on a real Ray cluster of two nodes of one core: what it draws, who draws it, and what is lost with a replica.
`pip install 'sdflow[ray]'`; pytest -m slow tests/on_ray
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from on_ray.conftest import SETTINGS, free_port
from PIL import Image
from serve.conftest import RunningServer, running_server
from started_python import Command
from until import PATIENCE, until

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "a large red circle on a blue background", "seed": 7, "steps": 6, "size": "64x64", "n": 4}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def built(sdflow: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample pipeline as a user builds it, and its cache."""
    folder = tmp_path_factory.mktemp("shapes")
    done = sdflow("run", str(ROOT / "workflows/shapes_cpu.yaml"), "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def arguments(built: Path) -> list[str]:
    loras = ["--loras", str(ROOT / "samples/loras"), "--cache", str(built / "cache")]
    return [str(built / "pipelines/shapes_cpu"), *loras, "--batch-sizes", "1"]


@contextmanager
def on_ray(cluster: Any, built: Path, *more: str, on: str = "ray") -> Iterator[RunningServer]:
    """`sdflow serve --on ray`, until it draws; taken down by Ctrl-C."""
    command = [sys.executable, "-m", "sdflow", "serve", *arguments(built), "--on", on, "--port", str(free_port())]
    environment = {**os.environ, **SETTINGS, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    server = RunningServer(process, process.stderr)
    thread = threading.Thread(target=server.listen, daemon=True)
    thread.start()
    try:
        server.url = server.wait_for(lambda line: line["event"] == "serving")["url"]
        server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
        thread.join(PATIENCE)


@pytest.fixture(scope="module")
def server(cluster: Any, built: Path) -> Iterator[RunningServer]:
    with on_ray(cluster, built, "--replicas", "2", "--threads", "1") as made:
        yield made


def drawn(server: RunningServer, **fields: Any) -> list[str]:
    answer = httpx.post(f"{server.url}/v1/images/generations", json={**ASKED, **fields}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return [each["b64_json"] for each in answer.json()["data"]]


def pixels(image: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(image))).tobytes()


def by_replica(server: RunningServer) -> dict[str, float]:
    """Images that each has drawn."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    lines = [line.split() for line in text.splitlines() if line.startswith("sdflow_replica_images_total{")]
    return {name.split('"')[1]: float(value) for name, value in lines}


def replicas() -> list[psutil.Process]:
    """The processes of the replicas that are there: of this test's cluster, whose processes are below this one."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if (each.cmdline() or [""])[0].startswith("ray::ServeReplica:sdflow:Replica"):
                found.append(each)
    return found


def test_more_replicas_come_when_images_wait_and_all_go_with_ctrl_c(cluster: Any, built: Path) -> None:
    """Before the server of the other tests: there is one on a cluster."""
    with on_ray(cluster, built, "--replicas", "1:2", "--queue", "1", "--threads", "1") as server:
        assert len(replicas()) == 1
        drawing = threading.Thread(target=lambda: [drawn(server, steps=100) for _ in range(30) if len(replicas()) < 2])
        drawing.start()
        until(lambda: len(replicas()) == 2)
        drawing.join(PATIENCE)
    assert server.process.returncode == 0
    until(lambda: not replicas())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")


def test_two_replicas_draw_what_one_server_draws(server: RunningServer, built: Path) -> None:
    with running_server(*arguments(built)) as alone:
        assert drawn(server) == drawn(alone)
    assert len(by_replica(server)) == 2, "the images of a request are drawn side by side"


def test_the_api_and_the_page_are_those_of_a_server(server: RunningServer) -> None:
    assert "<html" in httpx.get(server.url).text
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "shapes_cpu"
    assert httpx.get(f"{server.url}/readyz").json()["status"] == "ready"
    refused = httpx.post(f"{server.url}/v1/images/generations", json={**ASKED, "size": "63x64"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
    more = {"stream": True, "progress": True, "n": 1}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json={**ASKED, **more}, timeout=PATIENCE) as told:
        events = [line for line in told.iter_lines() if line.startswith("event")]
    assert events == ["event: image_generation.progress"] * 6 + ["event: image_generation.completed"]


def test_a_request_for_a_lora_goes_to_the_replica_that_has_it(server: RunningServer) -> None:
    wanted = {"loras": [{"name": "stripes", "scale": 0.8}], "n": 1, "steps": 1}
    before = by_replica(server)
    first = drawn(server, **wanted)
    (holder,) = {name for name, count in by_replica(server).items() if count > before.get(name, 0)}
    time.sleep(3)  # Ray Serve tells the front ten times in a second which replica has what
    before = by_replica(server)
    assert [drawn(server, **wanted) for _ in range(10)] == [first] * 10
    after = by_replica(server)
    assert {name for name, count in after.items() if count > before.get(name, 0)} == {holder}


def test_a_lora_that_was_sent_is_known_to_every_replica(server: RunningServer) -> None:
    content = (ROOT / "samples/loras/outline.safetensors").read_bytes()
    sent = httpx.post(
        f"{server.url}/v1/loras", files={"file": ("sent.safetensors", content)}, data={"name": "sent"}, timeout=PATIENCE
    )
    assert sent.status_code == 201, sent.text
    own, other = (drawn(server, loras=[{"name": name, "scale": 1}]) for name in ("outline", "sent"))
    assert [pixels(each) for each in own] == [pixels(each) for each in other], "the files name the LoRA"


def test_images_of_a_killed_replica_are_drawn_by_others_and_it_is_replaced(server: RunningServer) -> None:
    wanted = {"steps": 40}
    whole = drawn(server, **wanted)
    before = replicas()
    assert len(before) == 2
    fields = {**ASKED, **wanted, "stream": True, "progress": True}
    images: dict[int, str] = {}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json=fields, timeout=PATIENCE) as told:
        begun: set[int] = set()
        for line in told.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            begun.add(event.get("image_index", -1))
            if len(begun) == 4 and before:
                before.pop().kill()  # both draw by now
                before.clear()
            if event["type"].endswith("completed"):
                images[event["image_index"]] = event["b64_json"]
    assert [images[index] for index in sorted(images)] == whole
    until(lambda: len(replicas()) == 2)
    assert drawn(server, **wanted) == whole


def test_another_server_is_refused_or_takes_its_place(cluster: Any, built: Path, server: RunningServer) -> None:
    """The last one: the server of the other tests ends by it."""
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "sdflow", "serve", *arguments(built), "--on", "ray", "--port", port]
    environment = {**os.environ, **SETTINGS, "RAY_ADDRESS": cluster.address}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 2
    assert "an application sdflow is already running on this cluster" in refused.stderr
    assert "Traceback" not in refused.stderr
    with on_ray(cluster, built, "--take-over", "--threads", "1", "--port", port) as other:
        assert server.process.wait(PATIENCE) == 0
        server.wait_for(lambda line: line["event"] == "taken over")
        assert len(drawn(other)) == 4
    assert not replicas()
