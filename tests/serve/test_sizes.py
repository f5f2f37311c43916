"""How large an image may be follows from the model and the memory; one for which there is none takes no other with it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve.conftest import SIZE, RunningServer, running_server
from started_python import StartedPython
from until import PATIENCE

from sdflow.runtime.memory_limit import MOST_SIDES
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.jobs import Job, Ready
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics

OWN = 128
"""The side of the images that the small model was made for."""


def post(url: str, size: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "size": size, "steps": 1, "seed": 1, **fields}
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=PATIENCE)


def test_the_largest_size_is_said_and_what_is_larger_is_refused(server: RunningServer) -> None:
    """In the log, in /v1/models, in /readyz and in the refusal: what the worker measured."""
    ready = server.wait_for(lambda line: line["event"] == "ready")
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"]
    readyz = httpx.get(f"{server.url}/readyz", timeout=PATIENCE).json()
    said = [each["pipelines"]["tiny"]["max_pixels"] for each in (ready, readyz)]
    most = (MOST_SIDES * OWN) ** 2
    assert [*said, model["sdflow"]["max_pixels"]] == [most] * 3
    side = MOST_SIDES * OWN
    assert post(server.url, f"{side}x{side}").status_code == 200
    refused = post(server.url, f"{side}x{2 * side}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
    assert str(most) in refused.json()["error"]["message"]


def test_the_largest_size_is_what_somebody_said() -> None:
    for said, expected in ((None, 9), (5000, 5000)):
        drawing = Drawing(Limits(pixels=said), Metrics(), lambda message: None)
        assert drawing.most_pixels("tiny") == said
        drawing.hear(Ready({"tiny": {"max_pixels": 9}}))
        assert drawing.most_pixels("tiny") == expected


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory is Linux's")
def test_what_has_no_memory_fails_alone(tiny_pipeline: Path, started_python: StartedPython | None) -> None:
    """The worker has less memory than it measured, as after other processes took some."""
    options = ("--batch-sizes", "1", "--lanes", "1", "--max-pixels", "4194304")
    with running_server(str(tiny_pipeline), *options, started=started_python) as server:
        worker = server.worker()
        data = worker.memory_info().data
        worker.rlimit(psutil.RLIMIT_DATA, (data + (400 << 20), psutil.RLIM_INFINITY))
        small: list[httpx.Response] = []
        beside = [
            threading.Thread(target=lambda: small.append(post(server.url, SIZE, n=4, steps=30))) for _ in range(2)
        ]
        for each in beside:
            each.start()
        refused = post(server.url, "2048x2048")
        for each in beside:
            each.join(PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory"), refused.text
        assert [each.status_code for each in small] == [200, 200]
        assert post(server.url, SIZE).status_code == 200
        assert server.worker() == worker


def test_large_images_share_the_memory_and_only_small_ones_overtake_one_that_waits_for_it() -> None:
    shares = {"half": 0.5, "most": 0.8, "own": 0.0, "too much": 1.5}
    waiting = Waiting(lambda job: shares[job.pipeline])

    def job(pipeline: str, number: int) -> Job:
        return Job(f"{pipeline} {number}", 0, pipeline, "a", 1)

    jobs = [job("half", 1), job("half", 2), job("most", 3), job("own", 4), job("too much", 5)]
    for each in jobs:
        waiting.add(each)

    def take() -> Job | None:
        return waiting.take(lambda there: there[0] if there else None)

    assert [take(), take(), take(), take()] == [jobs[0], jobs[1], jobs[3], None], "what takes no part of it goes on"
    waiting.release(jobs[0])
    assert take() is None, "a half and most of it are too much"
    waiting.release(jobs[1])
    assert [take(), take()] == [jobs[2], None]
    waiting.release(jobs[2])
    assert take() == jobs[4], "alone, as nothing else is there"
