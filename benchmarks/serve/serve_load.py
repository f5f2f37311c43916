"""Load-test a served pipeline with random arrivals at fractions of its capacity, against two simpler servers.

    python benchmarks/serve/serve_load.py PIPELINE [--seconds 60] [--steps 4 --guidance 1]

The simpler servers run the same pipeline behind the same HTTP: one request at a time, and batches of up to 8 that
arrive within 50 ms. They are the obvious first implementation: call the pipeline, then encode the files
(benchmarks/serve/plain_server.py). --beside also measures them with files encoded by other threads during the next
call. All get the same arrivals, a seeded Poisson process that does not wait for answers. The client is httpx because
users of locust, k6 and wrk wait for their answer: a slow server then gets less load, and its tail latency looks better
than it is (coordinated omission).

The rates are fractions of the throughput of `sdflow serve` with 16 waiting clients. An idle `sdflow serve` measures its
batch sizes again; --rest waits for that before each of its rows and after, so that it slows nobody down. Memory is that
of each server's processes, before the load and after it, resident and on the GPU as the driver says.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

PARTS = (0.5, 0.8, 1.2)
QUEUE = 32
OURS, PLAIN = "sdflow serve", "plain"
PLAIN_FILE = Path(__file__).with_name("plain_server.py")
BESIDE = ", files beside"
POLICIES: dict[str, dict[str, Any]] = {
    "one at a time": {"most": 1},
    "batches of 8, 50 ms": {"most": 8, "patience": 0.05},
}
"""Fields of requests to the plain server: images of a batch, and seconds that its first one waits for others."""

EVENTS = "loaded", "measured", "batch_failed", "worker_lost"
"""Lines of a server's log that are shown."""

IDLE_CORES, MOST_REST = 0.2, 30.0
"""Processor time per second below which a server is idle, and the most seconds to wait for that."""


@dataclass(frozen=True)
class Server:
    url: str
    pid: int
    seconds: float  # until it was ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--images", type=int, help="of each rate, in place of --seconds")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, help="scale; without it, the pipeline's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS, help="of what it can take")
    parser.add_argument("--clients", type=int, default=16, help="that wait, while the capacity is measured")
    parser.add_argument("--capacity", type=float, help="images/s that it can take, where that was measured before")
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds without requests after each load on sdflow serve"
    )
    parser.add_argument("--until", type=float, help="seconds after which no further row begins")
    parser.add_argument("--own-capacity", action="store_true", help="measure the capacity of sdflow serve only")
    parser.add_argument("--cache", type=Path, help="that the pipeline was built with; without it, sdflow's own")
    parser.add_argument("--threads", help="of the server's processor")
    parser.add_argument("--lanes", help="of sdflow serve")
    parser.add_argument(
        "--beside",
        type=float,
        nargs="*",
        default=(),
        help="those of the parts at which the plain ones write files beside too",
    )
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    given, begun = parser.parse_args(), time.perf_counter()
    body = {"prompt": "a large red circle on a blue background", "steps": given.steps, "seed": 1}
    if given.guidance is not None:
        body["guidance_scale"] = given.guidance
    more = ["--threads", given.threads] if given.threads else []
    more += ["--lanes", given.lanes] if given.lanes else []
    with ExitStack() as running, ThreadPoolExecutor(2) as pool:
        own = pool.submit(running.enter_context, sdflow_server(given.pipeline, given.cache, *more))
        plain = pool.submit(running.enter_context, started([sys.executable, str(PLAIN_FILE), str(given.pipeline)]))
        servers = {OURS: own.result(), PLAIN: plain.result()}
        end = math.inf if given.until is None else begun + given.until
        asyncio.run(compare(servers, body, given, end))


async def compare(servers: dict[str, Server], body: dict[str, Any], given: Any, end: float) -> None:
    """Print tables of all servers at all rates, and of their memory. end: by `time.perf_counter`, after which no row
    begins."""
    names = [OURS, *POLICIES]
    beside = [f"{name}{BESIDE}" for name in POLICIES] if given.beside else []
    capacities, rows, own = dict[str, float](), list[dict[str, Any]](), dict[float, float]()
    before = {name: memory(server.pid) for name, server in servers.items()}
    found = {
        "pipeline": given.pipeline.name,
        "fields": body,
        "clients": given.clients,
        "ready": {name: server.seconds for name, server in servers.items()},
        "before": before,
        "capacities": capacities,
        "rows": rows,
    }

    def note() -> None:
        if given.out:
            found["after"] = {name: memory(server.pid) for name, server in servers.items()}
            given.out.write_text(json.dumps(found, indent=1))

    def server_of(name: str) -> str:
        return servers[OURS if name == OURS else PLAIN].url

    for name, server in servers.items():
        print(f"{name}: ready in {server.seconds:.1f} s", flush=True)
    for name in [OURS] if given.own_capacity else [*names, *beside]:
        taken = await capacity(server_of(name), asked(name, body), max(given.seconds / 4, 4), given.clients)
        capacities[name] = taken
        print(f"{name}: {taken:.2f} images/s for {given.clients} clients that wait; {load()}", flush=True)
        note()
        if name == OURS:
            await rested(servers[OURS].pid, given.rest)
    most = given.capacity or capacities[OURS]
    print(
        "| rate | server | images/s | p50 s | p95 s | of its p95 | refused | machine |\n|---|---|---|---|---|---|---|---|"
    )
    for part in given.parts:
        rate = part * most
        for name in [*names, *beside] if part in given.beside else names:
            if time.perf_counter() >= end:
                print(f"{part:.0%}, {name}: no time left", flush=True)
                continue
            bodies = itertools.repeat(asked(name, body))
            took, refused, whole = await arrivals(
                server_of(name), bodies, rate, given.seconds, given.seed, given.images
            )
            found_of = {"images/s": len(took) / whole, "p50": quantile(took, 0.5), "p95": quantile(took, 0.95)}
            p95 = own.setdefault(part, found_of["p95"])
            cells = [*found_of.values(), p95 / found_of["p95"]]
            figures = " | ".join([*(f"{each:.2f}" for each in cells), str(refused)])
            print(f"| {part:.0%}, {rate:.2f}/s | {name} | {figures} | {load()} |", flush=True)
            if took:
                rows.append(
                    {"part": part, "rate": rate, "server": name, **found_of, "refused": refused, "seconds": took}
                )
            note()
            if name == OURS:
                await rested(servers[OURS].pid, given.rest)
    print("| server | resident, MB: before, after | on the GPU, MB: before, after |\n|---|---|---|")
    for name, server in servers.items():
        pairs = zip(before[name], memory(server.pid), strict=True)
        sizes = ("" if was is None or now is None else f"{was:.0f}, {now:.0f}" for was, now in pairs)
        print(f"| {name} | {' | '.join(sizes)} |", flush=True)


def asked(name: str, body: dict[str, Any]) -> dict[str, Any]:
    plain = POLICIES.get(name.removesuffix(BESIDE), {})
    return {**body, **plain, "beside": True} if name.endswith(BESIDE) else {**body, **plain}


async def capacity(url: str, body: dict[str, Any], seconds: float, clients: int) -> float:
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
            await asyncio.gather(*(client(asking, begun + wanted) for _ in range(clients)))
    return done / (time.perf_counter() - begun)


async def rested(pid: int, seconds: float) -> None:
    """Wait these seconds, and then until a server's processes are idle."""
    if not seconds:
        return
    await asyncio.sleep(seconds)
    end, used = time.perf_counter() + MOST_REST, processor_seconds(pid)
    while time.perf_counter() < end:
        await asyncio.sleep(1)
        before, used = used, processor_seconds(pid)
        if used - before < IDLE_CORES:
            return
    print(f"not idle {MOST_REST:.0f} s later", flush=True)


async def arrivals(
    url: str, bodies: Iterator[dict[str, Any]], rate: float, seconds: float, seed: int, images: int | None = None
) -> tuple[list[float], int, float]:
    """Seconds of each request that was answered, how many were refused, and the seconds until the last was answered.
    images: number of requests, in place of the seconds in which they arrive."""
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
        due, arrived = begun + chance.expovariate(rate), 0
        while due < begun + seconds if images is None else arrived < images:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(
                ask(client, due, next(bodies))
            )  # from when it was due: a client that is late hides nothing
            due, arrived = due + chance.expovariate(rate), arrived + 1
    return took, refused, time.perf_counter() - begun


def quantile(values: Sequence[float], part: float) -> float:
    """NaN of none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def load() -> str:
    """Of the machine, its other users included."""
    return f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()}"


def processor_seconds(pid: int) -> float:
    """Of a server's processes."""
    return sum(used.user + used.system for used in (each.cpu_times() for each in processes(pid)))


def processes(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def memory(pid: int) -> tuple[float, float | None]:
    """MB of a server's processes: resident, and on the GPU as the driver says; None without one."""
    own = processes(pid)
    resident = sum(each.memory_info().rss for each in own) / 2**20
    question = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(question, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return resident, None
    used = {pid: float(size) for pid, _, size in (line.partition(", ") for line in lines) if size.strip().isdigit()}
    return resident, sum(used.get(str(each.pid), 0.0) for each in own) if used else None


@contextmanager
def sdflow_server(pipeline: Path, cache: Path | None, *more: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "sdflow", "serve", str(pipeline), "--port", "0", "--max-queue", str(QUEUE)]
    command += ["--no-check", *(["--cache", str(cache)] if cache else []), *more]
    with started(command) as server:
        yield server


@contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """Of a process that says where it serves, and then that it is ready, on standard error."""
    begun, process = time.perf_counter(), subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if line.startswith(b"{"):
                said = json.loads(line)
                url = said.get("url", url)
                if said["event"] == "ready":
                    print(line.decode().rstrip(), file=sys.stderr, flush=True)
                    break
                if said["event"] == "worker_lost":
                    raise SystemExit(line.decode())
            else:
                sys.stderr.buffer.write(line)
        else:
            raise SystemExit(f"it ended: {' '.join(command)}")
        threading.Thread(target=show_log, args=(process.stderr,), daemon=True).start()
        yield Server(url, process.pid, time.perf_counter() - begun)
    finally:
        process.terminate()
        process.wait()


def show_log(lines: Iterable[bytes]) -> None:
    """Read a server's log to its end, and show what it says of batches and failures."""
    for line in lines:
        if line.startswith(b"{") and json.loads(line)["event"] in EVENTS:
            print(line.decode().rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
