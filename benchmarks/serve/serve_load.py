"""Load-test a served pipeline with random arrivals at fractions of its capacity, against two simpler servers.

    python benchmarks/serve/serve_load.py PIPELINE [--seconds 60]

The simpler servers run the same pipeline behind the same HTTP: one request at a time, and batches of up to 8 that
arrive within 50 ms. They are the obvious first implementation: call the pipeline, then encode the files. --beside also
measures them with files encoded by other threads during the next call. All get the same arrivals, a seeded Poisson
process that does not wait for answers. The client is httpx because users of locust, k6 and wrk wait for their answer: a
slow server then gets less load, and its tail latency looks better than it is (coordinated omission).

The rates are fractions of the throughput of `sdflow serve` with 16 waiting clients.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

PARTS = (0.5, 0.8, 1.2)
CLIENTS = 16
QUEUE = 32
OURS = "sdflow serve"
BESIDE = ", files beside"
PLAIN = {"one at a time": (1, 0.0), "batches of 8, 50 ms": (8, 0.05)}
"""Images of a batch, and seconds that its first one waits for others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS, help="of what it can take")
    parser.add_argument("--capacity", type=float, help="images/s that it can take, where that was measured before")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="that the pipeline was built with")
    parser.add_argument("--threads", help="of the server's processor")
    parser.add_argument(
        "--beside",
        type=float,
        nargs="*",
        default=(),
        help="those of the parts at which the plain ones write files beside too",
    )
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    parser.add_argument("--plain", choices=PLAIN, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        serve_plainly(given.pipeline, *PLAIN[given.plain], given.steps)
        return
    body = {"prompt": "a large red circle on a blue background", "steps": given.steps, "seed": 1}
    more = ["--threads", given.threads] if given.threads else []
    with sdflow_server(given.pipeline, given.cache, *more) as own, plain_servers(given) as plain:
        asyncio.run(compare({OURS: own, **plain}, body, given))


async def compare(urls: dict[str, str], body: dict[str, Any], given: Any) -> None:
    """Print a table of all servers at all rates."""
    most, found = given.capacity, list[dict[str, Any]]()
    beside = {f"{name}{BESIDE}": url for name, url in urls.items() if name != OURS} if given.beside else {}
    for name, url in (urls | beside).items():
        taken = await capacity(url, asked(name, body), max(given.seconds / 4, 4))
        most = most or taken
        found.append({"server": name, "images/s": round(taken, 2)})
        print(f"{name}: {taken:.2f} images/s for {CLIENTS} clients that wait; {load()}", flush=True)
    print(
        "| rate | server | images/s | p50 s | p95 s | of its p95 | refused | machine |\n|---|---|---|---|---|---|---|---|"
    )
    own: dict[float, float] = {}
    for part in given.parts:
        names = urls | beside if part in given.beside else urls
        rate = part * most
        for name, url in names.items():
            bodies = itertools.repeat(asked(name, body))
            took, refused, whole = await arrivals(url, bodies, rate, given.seconds, given.seed)
            tail = quantile(took, 0.95)
            p95 = own.setdefault(part, tail)
            figures = f"{len(took) / whole:.2f} | {quantile(took, 0.5):.2f} | {tail:.2f} | {p95 / tail:.2f} | {refused}"
            print(f"| {part:.0%}, {rate:.2f}/s | {name} | {figures} | {load()} |", flush=True)
            found.append({"part": part, "rate": rate, "server": name, "refused": refused, "seconds": sorted(took)})
            if given.out:
                given.out.write_text(json.dumps(found))


def asked(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "beside": True} if name.endswith(BESIDE) else body


async def capacity(url: str, body: dict[str, Any], seconds: float) -> float:
    """Images a second for clients that ask again as soon as they are answered; a warm-up before."""
    done, begun = 0, 0.0

    async def client(asking: httpx.AsyncClient, until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            (await asking.post(f"{url}/v1/images/generations", json=body)).raise_for_status()
            done += 1

    async with httpx.AsyncClient(timeout=None) as asking:
        for wanted in (seconds / 4, seconds):
            done, begun = 0, time.perf_counter()
            await asyncio.gather(*(client(asking, begun + wanted) for _ in range(CLIENTS)))
    return done / (time.perf_counter() - begun)


async def arrivals(
    url: str, bodies: Iterator[dict[str, Any]], rate: float, seconds: float, seed: int
) -> tuple[list[float], int, float]:
    """Seconds of each request that was answered, how many were refused, and the seconds until the last was answered."""
    chance, begun = random.Random(seed), time.perf_counter()
    took: list[float] = []
    refused = 0

    async def ask(client: httpx.AsyncClient, due: float, body: dict[str, Any]) -> None:
        nonlocal refused
        answer = await client.post(f"{url}/v1/images/generations", json=body)
        if answer.status_code == 429:
            refused += 1
        else:
            answer.raise_for_status()
            took.append(time.perf_counter() - due)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client, asyncio.TaskGroup() as tasks:
        due = begun + chance.expovariate(rate)
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(
                ask(client, due, next(bodies))
            )  # from when it was due: a client that is late hides nothing
            due += chance.expovariate(rate)
    return took, refused, time.perf_counter() - begun


def quantile(values: Sequence[float], part: float) -> float:
    """NaN of none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def load() -> str:
    """Of the machine, its other users included."""
    return f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()}"


@contextmanager
def sdflow_server(pipeline: Path, cache: Path, *more: str) -> Iterator[str]:
    command = [sys.executable, "-m", "sdflow", "serve", str(pipeline), "--port", "0", "--max-queue", str(QUEUE)]
    with started([*command, "--no-check", "--cache", str(cache), *more]) as url:
        yield url


@contextmanager
def plain_servers(given: Any) -> Iterator[dict[str, str]]:
    """Started side by side."""

    def start(name: str) -> str:
        command = [sys.executable, __file__, str(given.pipeline), "--steps", str(given.steps), "--plain", name]
        return running.enter_context(started(command))

    with ExitStack() as running, ThreadPoolExecutor(len(PLAIN)) as pool:
        yield dict(zip(PLAIN, pool.map(start, PLAIN), strict=True))


@contextmanager
def started(command: list[str]) -> Iterator[str]:
    """Of a process that says where it serves, and then that it is ready, on standard error."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if line.startswith(b"{"):
                said = json.loads(line)
                url = said.get("url", url)
                if said["event"] == "ready":
                    break
                if said["event"] == "worker lost":
                    raise SystemExit(said["what"])
            else:
                sys.stderr.buffer.write(line)
        else:
            raise SystemExit(f"it ended: {' '.join(command)}")
        sink = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # its log goes on
        yield url
    finally:
        process.terminate()
        process.wait()
    sink.wait()


def serve_plainly(folder: Path, most: int, patience: float, steps: int) -> None:
    """What one writes first: a queue, a batch, a call of the pipeline for all of it."""
    import uvicorn
    from fastapi import FastAPI, HTTPException

    from sdflow.manifest import read_manifest
    from sdflow.runtime.denoiser import denoisers
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.serve.http.server import listen
    from sdflow.serve.log import log_line

    denoisers.KEPT = most  # each number of images keeps its sessions, as in the server that it is compared with
    pipeline = Pipeline.load(folder, read_manifest(folder).origin.target)
    queue: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
    drawing = ThreadPoolExecutor(1)  # on a GPU each thread makes what the libraries keep for one
    waiting, writing = 0, set[asyncio.Task[None]]()
    for count in range(1, most + 1):  # the sizes that may come have their sessions
        draw(pipeline, [{"prompt": "a", "seed": 0}] * count, 1)

    async def work() -> None:
        while True:
            batch, loop = [await queue.get()], asyncio.get_running_loop()
            end = loop.time() + patience
            while len(batch) < most:
                try:
                    batch.append(await asyncio.wait_for(queue.get(), max(0.0, end - loop.time())))
                except TimeoutError:
                    break
            images = await loop.run_in_executor(drawing, draw, pipeline, [fields for fields, _ in batch], steps)
            for (fields, answer), image in zip(batch, images, strict=True):
                if fields.get("beside"):
                    task = loop.create_task(answered(answer, image))
                    writing.add(task)
                    task.add_done_callback(writing.discard)
                else:
                    await answered(answer, image)

    async def answered(answer: asyncio.Future[Any], image: Any) -> None:
        answer.set_result(await asyncio.to_thread(file_of, image))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        working = asyncio.create_task(work())
        log_line("ready")
        yield
        working.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/images/generations")
    async def generations(fields: dict[str, Any]) -> dict[str, Any]:
        nonlocal waiting
        if waiting >= QUEUE:
            raise HTTPException(429)
        waiting += 1
        try:
            answer = asyncio.get_running_loop().create_future()
            await queue.put((fields, answer))
            return {"data": [{"b64_json": await answer}]}
        finally:
            waiting -= 1

    listening = listen("127.0.0.1", 0)
    log_line("serving", url=f"http://127.0.0.1:{listening.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def draw(pipeline: Any, wanted: Sequence[dict[str, Any]], steps: int) -> Sequence[Any]:
    import torch

    seeds = [torch.Generator().manual_seed(each["seed"]) for each in wanted]
    images: Sequence[Any] = pipeline(
        [each["prompt"] for each in wanted], generator=seeds, num_inference_steps=steps
    ).images
    return images


def file_of(image: Any) -> str:
    import io
    from base64 import b64encode

    file = io.BytesIO()
    image.save(file, "PNG")
    return b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
