"""A worker that is stopped, or that computes without end, is noticed, killed and replaced."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper
from serve.conftest import SIZE, RunningServer, running_server
from started_python import StartedPython
from transformers import CLIPTokenizer
from until import PATIENCE, until

from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.lanes import Lanes
from sdflow.serve.engine.pulse import LEAST_SECONDS, Patience, Pulse, Pulses
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.jobs import Job, Message

STALL = 10.0
LONG = {"prompt": "a", "steps": 150, "n": 4, "stream": True, "progress": True, "size": "256x256"}


def ask(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=PATIENCE)


def post(server: RunningServer, size: object = SIZE, prompt: str = "a") -> httpx.Response:
    body = {"prompt": prompt, "size": size, "steps": 1}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)


def replaced(server: RunningServer, old: psutil.Process) -> psutil.Process:
    """The worker in the place of this one, as soon as there is one; the old one is gone by then."""
    known = psutil.Process(server.process.pid).children()  # multiprocessing has one of its own
    until(lambda: any(each not in known for each in psutil.Process(server.process.pid).children()))
    (new,) = (each for each in psutil.Process(server.process.pid).children() if each not in known)
    assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
    return new


def test_a_stopped_worker_is_replaced_and_requests_are_refused_meanwhile(
    tiny_pipeline: Path, started_python: StartedPython | None
) -> None:
    """By SIGSTOP, while it has nothing to do; and while it draws, with a second request behind, which the next one draws. That is
    of the same size: another size has places of its own and would be begun beside it."""
    options = ("--batch-sizes", "1", "--lanes", "1", "--stall", str(STALL))
    with running_server(str(tiny_pipeline), *options, started=started_python) as server:
        begun, worker = len(server.lines), server.worker()
        worker.suspend()
        held = replaced(server, worker)
        held.suspend()  # so that it is not ready before it is asked
        assert ask(server, "/readyz").status_code == 503
        refused = post(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) > 0
        told = server.wait_for(lambda line: line["event"] == "worker_lost", begun)
        assert told["kind"] == "WorkerHung" and "no heartbeat" in told["what"]
        held.resume()
        server.wait_until_ready(begun)
        assert ask(server, "/readyz").status_code == 200

        begun, behind = len(server.lines), list[httpx.Response]()
        asking = threading.Thread(target=lambda: behind.append(post(server, LONG["size"])))
        url = f"{server.url}/v1/images/generations"
        with httpx.stream("POST", url, json=LONG, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: image_generation.progress"
            asking.start()
            until(lambda: server.metrics("sdflow_waiting_images") == LONG["n"])
            server.worker().suspend()
            rest = list(lines)
        assert "event: error" in rest and any("worker_lost" in line for line in rest)
        server.wait_until_ready(begun)
        asking.join(PATIENCE)
        assert behind[0].status_code == 200


def never_ending(pipeline: Path, folder: Path, word: str) -> Path:
    """A copy of the pipeline whose text encoder computes without end where the prompt has this word."""
    made = Path(shutil.copytree(pipeline, folder))
    tokenizer = CLIPTokenizer.from_pretrained(made / "tokenizer")
    token = tokenizer(word).input_ids[1]
    assert token not in tokenizer("a warm-up").input_ids
    path = made / "text_encoder/model.onnx"
    model = onnx.load(path)
    graph, (output, *_), (ids, *_) = model.graph, model.graph.output, model.graph.input
    kind = numpy_helper.from_array
    graph.initializer.extend([
        kind(np.array(token, helper.tensor_dtype_to_np_dtype(ids.type.tensor_type.elem_type)), "hang.token"),
        kind(np.array(2**62, np.int64), "hang.times"),
        kind(np.array(True), "hang.true"),
        kind(np.array(0, np.float32), "hang.zero"),
    ])  # fmt: skip
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["goes_on"]),
            helper.make_node("Add", ["value", "value"], ["doubled"]),
        ],
        "hang.body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("doubled", TensorProto.FLOAT, []),
        ],
    )
    for node in graph.node:
        for place, name in enumerate(node.output):
            if name == output.name:
                node.output[place] = "hang.before"
    graph.node.extend(
        [
            helper.make_node("Equal", [ids.name, "hang.token"], ["hang.there"]),
            helper.make_node("Cast", ["hang.there"], ["hang.counted"], to=TensorProto.INT64),
            helper.make_node("ReduceMax", ["hang.counted"], ["hang.any"], keepdims=0),
            helper.make_node("Mul", ["hang.any", "hang.times"], ["hang.trips"]),
            helper.make_node("Loop", ["hang.trips", "hang.true", "hang.zero"], ["hang.value"], body=body),
            helper.make_node("Add", ["hang.before", "hang.value"], [output.name]),
        ]
    )
    onnx.save(model, path, save_as_external_data=False)
    return made


def test_a_kernel_that_never_ends_is_noticed(
    tiny_pipeline: Path, tmp_path: Path, started_python: StartedPython | None
) -> None:
    """By the worker itself, which answers all the while. The next worker draws."""
    folder = never_ending(tiny_pipeline, tmp_path / "tiny", "zebra")
    options = ("--batch-sizes", "1", "--lanes", "1", "--stall", str(STALL / 2), "--no-check")
    with running_server(str(folder), *options, started=started_python) as server:
        begun, before = len(server.lines), server.worker()
        hangs = post(server, prompt="a zebra")
        assert hangs.json()["error"]["code"] == "worker_lost"
        lost = server.wait_for(lambda line: line["event"] == "worker_lost", begun)
        assert lost["kind"] == "WorkerHung" and "no progress" in lost["what"]
        server.wait_until_ready(begun)
        assert server.worker() != before
        assert post(server, prompt="a horse").status_code == 200


@pytest.mark.parametrize(("sizes", "seconds"), [((), 60), ((64,), 60), ((64, 128), 960), ((1024,), 6000)], ids=str)
def test_larger_images_may_take_longer(sizes: tuple[int, ...], seconds: float) -> None:
    patience = Patience(LEAST_SECONDS, 6000, {"tiny": 64 * 64})
    jobs = tuple(Job("a", 0, "tiny", "a", 1, arguments={"height": size, "width": size}) for size in sizes)
    assert patience.of(jobs) == seconds


@pytest.mark.parametrize(("loading", "looks"), [(False, 10), (True, 40)])
def test_an_image_that_waits_for_a_pipeline_hangs_only_after_the_time_of_a_start(
    monkeypatch: pytest.MonkeyPatch, loading: bool, looks: int
) -> None:
    """Looks are counted, so a busy machine changes nothing."""
    monkeypatch.setattr("sdflow.serve.engine.pulse.PULSE_SECONDS", 0.01)
    monkeypatch.setattr("sdflow.serve.engine.pulse.START_SECONDS", 0.3)

    def find(job: Job) -> ServedPipeline:
        raise AssertionError("it is not loaded")

    lanes, heard = Lanes(lambda message: None), list[Message | Pulse]()
    lanes.add(lambda waiting, tell: Engine(find, {}, tell, waiting=waiting))
    lanes.submit(Job("waits", 0, "tiny", "a", 1))
    Pulses(heard.append).watch(lanes, Patience(0.1, 0.1, {"tiny": 64 * 64}), partial(bool, loading))
    until(lambda: any(isinstance(each, Pulse) and each.stuck is not None for each in heard))
    first = next(number for number, each in enumerate(heard) if isinstance(each, Pulse) and each.stuck is not None)
    assert looks <= first <= looks + 5
