"""A server under attack: slow clients by the thousand, bombs, and workers that are killed and stopped while clients draw."""

from __future__ import annotations

import random
import socket
import threading
import time
import zlib
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve.conftest import SIZE, RunningServer, running_server
from serve.test_uploads import claiming
from until import PATIENCE, until

from sdflow.serve.http.connection import REFUSED_SECONDS

CONNECTIONS = 1500
MOST = 512
HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n"
BEGINNINGS = (b"", b"GET / HTTP/1.1\r\nX:", HEAD + b"\r\n{")
FAULTS = 12
CLIENTS = 4
MOST_MEMORY = 600 << 20
"""Bytes by which the process that answers may grow."""


def address(server: RunningServer) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "size": SIZE, "steps": 2, "seed": 7, **fields}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)


def resident(server: RunningServer) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def test_slow_clients_are_cut_off_and_others_are_answered(tiny_pipeline: Path, capsys: pytest.CaptureFixture) -> None:
    """Each drips a byte a second: before a head, within one, within a body. None is held for longer than the limits say."""
    with running_server(str(tiny_pipeline), "--lanes", "1", "--max-connections", str(MOST)) as server:
        process, before = psutil.Process(server.process.pid), resident(server)
        opened, most, lasted = list[socket.socket](), 0, 0.0
        begun = time.monotonic()
        for number in range(CONNECTIONS):
            made = socket.create_connection(address(server), PATIENCE)
            made.settimeout(PATIENCE)
            opened.append(made)
            with suppress(OSError):  # refused already, and found below
                made.sendall(BEGINNINGS[number % len(BEGINNINGS)])
        refused = time.monotonic() + REFUSED_SECONDS + 2  # those beyond the limit have had time to read why
        while opened:
            if time.monotonic() > refused:
                most = max(most, process.num_fds())
            time.sleep(1)
            for each in tuple(opened):
                try:
                    each.sendall(b" ")
                except OSError:  # cut off
                    each.close()
                    opened.remove(each)
            lasted = time.monotonic() - begun
            assert lasted < PATIENCE, f"{len(opened)} are held still"
        assert most < 2 * MOST
        until(lambda: post(server).status_code == 200)
        grown = resident(server) - before
        assert grown < MOST_MEMORY
        with capsys.disabled():
            print(
                f"{CONNECTIONS} slow connections: {most} descriptors, {grown >> 20} MB, the last cut off after {lasted:.0f} s"
            )


def bombs() -> list[tuple[str, dict[str, Any]]]:
    """A path, and what httpx is to send there."""
    image, form = "/v1/images/edits", {"prompt": "a"}
    pixels = zlib.compress(bytes(64 << 20), 9)
    words = b"\x89PNG\r\n\x1a\n" + pixels
    control = [{"name": "a", "image": b64encode(claiming(60000, 60000)).decode()}] * 1000
    return [
        *((image, {"data": form, "files": {"image": claiming(side, side)}}) for side in (2049, 8000, 60000, 2**31 - 1)),
        (image, {"data": form, "files": {"image": words}}),
        (image, {"data": {f"field{number}": "a" * 100_000 for number in range(300)}, "files": {"image": b""}}),
        (image, {"data": {**form, "loras": "[" * 900_000}, "files": {"image": claiming(64, 64)}}),
        ("/v1/images/generations", {"content": b"[" * (30 << 20), "headers": {"Content-Type": "application/json"}}),
        ("/v1/images/generations", {"json": {"prompt": "a" * (30 << 20)}}),
        ("/v1/images/generations", {"json": {"prompt": "a", "control": control}}),
        ("/v1/images/generations", {"json": {"prompt": "a", "n": 10**30, "steps": 10**30, "size": "99999x99999"}}),
        ("/v1/images/generations", {"json": {"prompt": "a", "size": "4096x4096"}}),
        ("/sdapi/v1/img2img", {"json": {"init_images": [b64encode(claiming(8000, 8000)).decode()]}}),
        ("/sdapi/v1/txt2img", {"json": {"batch_size": 10**9, "n_iter": 10**9, "width": 10**9}}),
        ("/v1/loras", {"files": {"file": ("a.safetensors", (2**62).to_bytes(8, "little") + b"{" * 1000)}}),
        ("/v1/loras", {"files": {"file": ("a.safetensors", (90 << 20).to_bytes(8, "little") + b"[" * (90 << 20))}}),
    ]


def test_no_bomb_takes_the_server_down(tiny_pipeline: Path, capsys: pytest.CaptureFixture) -> None:
    """Each is refused as the client's mistake, several at a time; the worker stays, and memory is given back."""
    with running_server(str(tiny_pipeline), "--lanes", "1") as server:
        worker, expected, before = server.worker(), post(server).json()["data"], resident(server)
        answers: list[tuple[str, int]] = []

        def send(path: str, what: dict[str, Any]) -> None:
            answer = httpx.post(f"{server.url}{path}", timeout=PATIENCE, **what)
            answers.append((path, answer.status_code))

        for _ in range(3):
            clients = [threading.Thread(target=send, args=each) for each in bombs()]
            for client in clients:
                client.start()
            for client in clients:
                client.join(PATIENCE)
        assert len(answers) == 3 * len(bombs())
        assert [each for each in answers if each[1] not in (400, 413, 503)] == []
        assert server.worker() == worker and post(server).json()["data"] == expected
        assert resident(server) - before < MOST_MEMORY
        with capsys.disabled():
            print(f"{len(answers)} bombs: {(resident(server) - before) >> 20} MB more")


def test_workers_that_are_killed_and_stopped_lose_what_they_drew_alone(
    tiny_pipeline: Path, capsys: pytest.CaptureFixture
) -> None:
    """While clients draw. Every answer is the image or a 503 that says when to come again, and in the end all is as before."""
    chosen = random.Random(27)
    with running_server(str(tiny_pipeline), "--batch-sizes", "1,2", "--lanes", "1", "--stall", "15") as server:
        expected = post(server).json()["data"]
        counts: dict[int, int] = {}
        ended, counting = threading.Event(), threading.Lock()
        wrong: list[str] = []

        def draw() -> None:
            while not ended.is_set():
                answer = post(server)
                with counting:
                    counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
                    if answer.status_code == 200:
                        if answer.json()["data"] != expected:
                            wrong.append("another image")
                    elif answer.status_code != 503 or "retry-after" not in answer.headers:
                        wrong.append(answer.text)
                if answer.status_code != 200:
                    time.sleep(0.2)

        clients = [threading.Thread(target=draw) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for number in range(FAULTS):
            begun, drawn = len(server.lines), counts.get(200, 0)
            time.sleep(chosen.random())
            if number % 3:
                server.worker().kill()
            else:
                server.worker().suspend()
            server.wait_until_ready(begun)
            until(lambda drawn=drawn: counts.get(200, 0) > drawn)
        ended.set()
        for client in clients:
            client.join(PATIENCE)
        assert wrong == []
        assert server.metrics("sdflow_worker_losses_total") == FAULTS
        assert server.metrics("sdflow_waiting_images") == server.metrics("sdflow_drawing_images") == 0
        assert post(server).json()["data"] == expected
        with capsys.disabled():
            print(f"{FAULTS} kills and stops: answers by status {counts}")
