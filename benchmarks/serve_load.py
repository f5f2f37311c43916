"""A served pipeline under load: requests that arrive at random, at parts of what it can take, beside two plainer servers.

    python benchmarks/serve_load.py PIPELINE [--seconds 60]
    python benchmarks/serve_load.py PIPELINE --soak 1800 [--rate 0.5] [--loras DIR --cache DIR]

The plainer ones draw the same pipeline behind the same HTTP: one request after the other, and batches of up to 8 of what
arrives within 50 ms. All three get the same arrivals: a Poisson process with a seed, which does not wait for answers. That is why
the client is httpx and none of the known load tools: locust, k6 and wrk have users that each wait for their answer, so a slow
server gets less to do, and its tail looks better than it is (coordinated omission).

The rates are parts of what `sdflow serve` answers to 16 clients that wait. --soak: instead, this many seconds at 80 % or at
--rate, of requests that differ in steps, guidance, size and LoRAs, and what the memory of the process that draws does.
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
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

PARTS = (0.5, 0.8, 1.2)
CLIENTS = 16
QUEUE = 32
PLAIN = {"one at a time": (1, 0.0), "batches of 8, 50 ms": (8, 0.05)}
"""Images of a batch, and seconds that its first one waits for others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS, help="of what it can take")
    parser.add_argument("--capacity", type=float, help="images/s that it can take, where that was measured before")
    parser.add_argument("--rate", type=float, help="of the soak, in images/s")
    parser.add_argument("--loras", type=Path, help="of the soak: the folder that they are in")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="that the pipeline was built with")
    parser.add_argument("--threads", help="of the server's processor")
    parser.add_argument("--plain", choices=PLAIN, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        serve_plainly(given.pipeline, *PLAIN[given.plain], given.steps)
        return
    body = {"prompt": "a large red circle on a blue background", "steps": given.steps, "seed": 1}
    if given.soak:
        with sdflow_server(given) as url:
            asyncio.run(soak(url, body, given))
        return
    with sdflow_server(given) as own:
        urls = {"sdflow serve": own}
        with plain_server(given, "one at a time") as one, plain_server(given, "batches of 8, 50 ms") as eight:
            urls |= {"one at a time": one, "batches of 8, 50 ms": eight}
            asyncio.run(compare(urls, body, given))


async def compare(urls: dict[str, str], body: dict[str, Any], given: Any) -> None:
    """Print a table of all servers at all rates."""
    most = given.capacity
    for name, url in urls.items():
        found = await capacity(url, body, max(given.seconds / 4, 5))
        most = most or found
        print(f"{name}: {found:.2f} images/s for {CLIENTS} clients that wait; {load()}", flush=True)
    print(
        "| rate | server | images/s | p50 s | p95 s | of its p95 | refused | machine |\n|---|---|---|---|---|---|---|---|"
    )
    for part in given.parts:
        rate, p95 = part * most, 0.0
        for name, url in urls.items():
            took, refused, whole = await arrivals(url, itertools.repeat(body), rate, given.seconds, given.seed)
            tail = quantile(took, 0.95)
            p95 = p95 or tail
            figures = f"{len(took) / whole:.2f} | {quantile(took, 0.5):.2f} | {tail:.2f} | {p95 / tail:.2f} | {refused}"
            print(f"| {part:.0%}, {rate:.2f}/s | {name} | {figures} | {load()} |", flush=True)


async def soak(url: str, body: dict[str, Any], given: Any) -> None:
    """Print the memory of the process that draws, ten times, and what grew from the second to the last."""
    names = [path.stem for path in sorted(given.loras.glob("*.safetensors"))] if given.loras else []
    rate, found = given.rate or 0.8 * await capacity(url, body, 10), []
    for number in range(10):
        bodies = varied(body, random.Random(given.seed + number), names)
        took, refused, _ = await arrivals(url, bodies, rate, given.soak / 10, given.seed + number)
        async with httpx.AsyncClient(timeout=None) as client:
            text = (await client.get(f"{url}/metrics")).text
        (memory,) = (line.split()[1] for line in text.splitlines() if line.startswith("sdflow_worker_resident_bytes "))
        found.append(float(memory) / 2**20)
        print(
            f"{len(took)} images, {refused} refused, p95 {quantile(took, 0.95):.2f} s, {found[-1]:.0f} MB", flush=True
        )
    print(f"from {found[1]:.0f} to {found[-1]:.0f} MB behind the first tenth; {load()}")


def varied(body: dict[str, Any], chance: random.Random, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Requests that differ in what makes sessions, tables and weights."""
    while True:
        loras = [{"name": name, "scale": chance.choice((0.5, 0.7, 1.0))} for name in names if chance.random() < 0.5]
        size = {"size": f"{chance.choice((96, 128))}x128"} if chance.random() < 0.2 else {}
        more = {"guidance_scale": chance.choice((1.0, 5.0, 7.5)), "seed": chance.randrange(1000), "loras": loras}
        yield {**body, **more, **size, "steps": chance.randrange(2, 2 * body["steps"])}


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
def sdflow_server(given: Any) -> Iterator[str]:
    command = [sys.executable, "-m", "sdflow", "serve", str(given.pipeline), "--port", "0", "--max-queue", str(QUEUE)]
    command += ["--no-check", "--cache", str(given.cache)]
    command += ["--loras", str(given.loras)] if given.loras else []
    command += ["--threads", given.threads] if given.threads else []
    with started(command) as url:
        yield url


@contextmanager
def plain_server(given: Any, name: str) -> Iterator[str]:
    command = [sys.executable, __file__, str(given.pipeline), "--steps", str(given.steps), "--plain", name]
    with started(command) as url:
        yield url


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
    from sdflow.runtime import denoisers
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.serve.guard import log_line
    from sdflow.serve.server import listen

    denoisers.KEPT = most  # each number of images keeps its sessions, as in the server that it is compared with
    pipeline = Pipeline.load(folder, read_manifest(folder).origin.target)
    queue: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
    waiting = 0
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
            images = await asyncio.to_thread(draw, pipeline, [fields for fields, _ in batch], steps)
            for (_, answer), image in zip(batch, images, strict=True):
                answer.set_result(image)

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


def draw(pipeline: Any, wanted: Sequence[dict[str, Any]], steps: int) -> list[str]:
    import io
    from base64 import b64encode

    import torch

    seeds = [torch.Generator().manual_seed(each["seed"]) for each in wanted]
    drawn = pipeline([each["prompt"] for each in wanted], generator=seeds, num_inference_steps=steps)
    files = [io.BytesIO() for _ in wanted]
    for image, file in zip(drawn.images, files, strict=True):
        image.save(file, "PNG")
    return [b64encode(file.getvalue()).decode() for file in files]


if __name__ == "__main__":
    main()
