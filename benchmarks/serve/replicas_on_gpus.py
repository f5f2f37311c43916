"""Measure `sdflow serve --on ray` on a host with several GPUs: replicas, a lost replica, LoRAs, shared GPUs, and binds.

    python benchmarks/serve/replicas_on_gpus.py load PIPELINE... [--steps 20] [--replicas 1 2] [--seconds 15]
        [--clients 16] [--kill-seconds 40] [--kill-part 0.8] [--json FILE]
    python benchmarks/serve/replicas_on_gpus.py lora PIPELINE --loras DIR --cache DIR [--steps 8]
    python benchmarks/serve/replicas_on_gpus.py share PIPELINE PIPELINE [--steps 4]
    python benchmarks/serve/replicas_on_gpus.py binds GRAPHS --name NAME [--submodel unet] [--workers 1 4 16]

Each starts a Ray cluster of this machine and ends it. PIPELINE: with weights (benchmarks/gpu/with_weights.py). Clients
and arrivals as in serve_load.py.

load: images/s of each number of replicas for waiting clients, then latencies at 80 % of that, for one pipeline after the
other, all served by each replica. With --kill-seconds, one of several replicas is killed (SIGKILL) after a fifth of
further arrivals for the first pipeline: what the requests got, and the time until its successor, which loads all of
them, draws. lora: which replicas draw the images of two LoRAs. share: two replicas with half of one GPU each serve both
pipelines; the driver's memory of each process. binds: tasks on a Ray cluster bind weights to a graph of GRAPHS (as in
pipelines_on_gpu.py) and hash the result; each worker makes one. --steps, --seconds, and --clients (waiting, per
replica): one for all pipelines, or one for each. `--gpus 0` tries it on CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.serve.serve_load import quantile, started  # noqa: E402

PART = 0.8
BACK_SECONDS = 150.0
"""Most to wait for the successor of a killed replica."""
PROMPT = "a large red circle on a blue background"
TITLE = "ray::ServeReplica:sdflow:Replica"


def say(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def cluster(gpus: int, scratch: Path | None) -> Iterator[str]:
    """A Ray cluster of this machine; its address. scratch: a short path, since Ray's sockets lie below it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if scratch is not None:  # not temp_dir: Ray would still write the address to /tmp/ray, without making the folder
        os.environ["RAY_TMPDIR"] = str(scratch.resolve())
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": os.cpu_count(), "num_gpus": gpus, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made.address
    finally:
        ray.shutdown()  # Ray refuses to end a cluster to which this process is connected
        made.shutdown()


@contextmanager
def serving(options: argparse.Namespace, replicas: int, gpus: float, *more: str) -> Iterator[str]:
    """`sdflow serve --on ray`; its URL. It ends with Ctrl-C, like a user's."""
    count = max(1, int(replicas * gpus)) if gpus else 0
    with cluster(count, options.scratch) as address, socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = tried.getsockname()[1]
        tried.close()
        os.environ["RAY_ADDRESS"] = address
        command = [sys.executable, "-m", "sdflow", "serve", *map(str, options.pipelines), "--on", "ray"]
        command += ["--replicas", str(replicas), "--port", str(port), "--no-check", "--max-queue", "256", *more]
        command += ["--threads", str(options.threads)]
        if gpus and gpus != 1:
            command += ["--gpus", str(gpus)]
        begun = time.perf_counter()
        with started(command) as server:
            say(f"[{time.perf_counter() - begun:.1f} s] {replicas} replicas are ready at {server.url}")
            yield server.url


def body_of(options: argparse.Namespace, number: int = 0, **more: Any) -> dict[str, Any]:
    """A request for the pipeline of this number."""
    size = {} if options.size is None else {"size": f"{options.size}x{options.size}"}
    model = options.pipelines[number].resolve().name
    return {"prompt": PROMPT, "model": model, "steps": of(options.steps, number), "seed": 1, **size, **more}


def of(values: list[Any], number: int) -> Any:
    """The option's value for the pipeline of this number."""
    return values[number] if len(values) > 1 else values[0]


async def capacity(url: str, body: dict[str, Any], seconds: float, clients: int) -> float:
    """Images a second for clients that ask again as soon as they are answered; a warm-up before."""
    done = 0

    async def client(asking: httpx.AsyncClient, until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            (await asking.post(f"{url}/v1/images/generations", json=body)).raise_for_status()
            done += 1

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as asking:
        for wanted in (seconds / 3, seconds):
            done, begun = 0, time.perf_counter()
            await asyncio.gather(*(client(asking, begun + wanted) for _ in range(clients)))
    return done / (time.perf_counter() - begun)


async def arrivals(url: str, body: dict[str, Any], rate: float, seconds: float) -> tuple[list[dict[str, Any]], float]:
    """What each request got: when it was due, how long it took, its status; and the seconds until the last answer."""
    import random

    chance, begun = random.Random(0), time.perf_counter()
    found: list[dict[str, Any]] = []

    async def ask(client: httpx.AsyncClient, due: float) -> None:
        each: dict[str, Any] = {"due": due - begun}
        try:
            answer = await client.post(f"{url}/v1/images/generations", json=body)
            each |= {"status": answer.status_code, "retry_after": answer.headers.get("Retry-After")}
            if answer.status_code != 200:
                each["said"] = answer.text[:200]
        except httpx.HTTPError as error:
            each["status"] = type(error).__name__
        found.append(each | {"seconds": time.perf_counter() - due})

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as tasks:
        due = begun + chance.expovariate(rate)
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(ask(client, due))
            due += chance.expovariate(rate)
    return found, time.perf_counter() - begun


def figures(found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    took = [each["seconds"] for each in found if each["status"] == 200]
    return {
        "requests": len(found),
        "images/s": len(took) / seconds,
        "p50_s": quantile(took, 0.5),
        "p95_s": quantile(took, 0.95),
        "most_s": max(took, default=None),
        "statuses": {str(status): count for status, count in Counter(each["status"] for each in found).items()},
        "without_retry_after": sum(each["status"] == 503 and not each["retry_after"] for each in found),
    }


def by_replica(url: str) -> dict[str, float]:
    """Images that each replica has drawn."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    lines = [line.split() for line in text.splitlines() if line.startswith("sdflow_replica_images_total{")]
    return {name.split('"')[1]: float(value) for name, value in lines}


def note(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps({"part": options.part, "steps": options.steps, **found}, indent=1) + "\n")


def load(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {folder.resolve().name: {} for folder in options.pipelines}
    for replicas in options.replicas:
        with serving(options, replicas, options.gpus) as url:
            for number, (name, rows) in enumerate(found.items()):
                body, clients = body_of(options, number), of(options.clients, number) * replicas
                seconds = of(options.seconds, number)
                rate = asyncio.run(capacity(url, body, seconds, clients))
                say(f"{name}, {replicas} replicas: {rate:.2f} images/s for {clients} waiting clients")
                got, whole = asyncio.run(arrivals(url, body, PART * rate, seconds))
                rows[str(replicas)] = {"capacity": rate, "at_80_percent": figures(got, whole), "by": by_replica(url)}
                say(f"{name}, {replicas} replicas, 80 %: {rows[str(replicas)]['at_80_percent']}")
                note(options, found)
                if options.kill_seconds and replicas > 1 and not number:
                    rows["killed"] = killed(url, options, rate)
                    note(options, found)
    if len(options.replicas) > 1:
        for rows in found.values():
            first, last = (rows[str(each)] for each in (options.replicas[0], options.replicas[-1]))
            rows["ratio"] = {
                "capacity": last["capacity"] / first["capacity"],
                "p95": last["at_80_percent"]["p95_s"] / first["at_80_percent"]["p95_s"],
            }
            say(rows["ratio"])
    return found


def replicas_here() -> list[psutil.Process]:
    """Those of the cluster that this process started."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if (each.cmdline() or [""])[0].startswith(TITLE):
                found.append(each)
    return found


def killed(url: str, options: argparse.Namespace, most: float) -> dict[str, Any]:
    """Kill a replica under load. most: images/s that the server can take."""
    body, before, begun = body_of(options), by_replica(url), time.perf_counter()
    seen: dict[str, Any] = {}

    def end_one() -> None:
        time.sleep(options.kill_seconds / 5)
        victim = replicas_here()[0]
        seen["killed_at"] = time.perf_counter() - begun
        victim.send_signal(signal.SIGKILL)
        while time.perf_counter() - begun < options.kill_seconds + BACK_SECONDS:
            if by_replica(url).keys() - before.keys():
                seen["drew_again_after_s"] = time.perf_counter() - begun - seen["killed_at"]
                return
            time.sleep(0.25)

    thread = threading.Thread(target=end_one)
    thread.start()
    rate = options.kill_part * most
    got, whole = asyncio.run(arrivals(url, body, rate, options.kill_seconds))
    while thread.is_alive():  # its successor needs a request
        httpx.post(f"{url}/v1/images/generations", json=body | {"n": 4}, timeout=120)
    at = seen.get("killed_at", 0.0)
    found = {
        "rate": rate,
        **seen,
        "all": figures(got, whole),
        "before": figures([each for each in got if each["due"] < at - 3], at or 1.0),
        "the next 20 s": figures([each for each in got if at - 3 <= each["due"] < at + 20], 23.0),
        "errors": [each for each in got if each["status"] != 200][:20],
        "by": by_replica(url),
    }
    say(json.dumps({name: value for name, value in found.items() if name != "errors"}, indent=1))
    return found


def lora(options: argparse.Namespace) -> dict[str, Any]:
    names = sorted(path.stem for path in options.loras.glob("*.safetensors"))[:2]
    found: dict[str, Any] = {}
    more = ["--loras", str(options.loras), "--cache", str(options.cache)]
    with serving(options, 2, options.gpus, *more) as url:

        def draw(name: str, seed: int) -> None:
            body = body_of(options, loras=[{"name": name, "scale": 0.8}], seed=seed)
            httpx.post(f"{url}/v1/images/generations", json=body, timeout=120).raise_for_status()

        for name in names:
            draw(name, 0)
        time.sleep(3)  # Ray Serve tells the front ten times in a second which replica has what
        for name in names:
            before = by_replica(url)
            for seed in range(1, 11):
                draw(name, seed)
            after = by_replica(url)
            found[name] = {
                each: after[each] - before.get(each, 0) for each in after if after[each] > before.get(each, 0)
            }
            say(f"{name}: {found[name]}")
    return found


def share(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with serving(options, 2, 0.5 if options.gpus else 0) as url:
        names = [folder.resolve().name for folder in options.pipelines]
        for number, name in enumerate(names):
            seconds, clients = of(options.seconds, number) / 2, of(options.clients, number)
            rate = asyncio.run(capacity(url, body_of(options, number), seconds, clients))
            found[name] = {"images/s": rate}
            say(f"{name}: {rate:.2f} images/s of two replicas on one GPU")
            note(options, found)
        found["memory"] = memory()
        found["by"] = by_replica(url)
        say(json.dumps(found, indent=1))
    return found


def memory() -> dict[str, Any]:
    """MiB of each process on the GPUs, as the driver says, and of the GPUs."""

    def asked(*query: str) -> list[str]:
        with_units = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(with_units, capture_output=True, text=True, check=False).stdout.splitlines()
        except OSError:
            return []

    processes = asked("--query-compute-apps=pid,gpu_uuid,used_memory")
    return {"processes": processes, "gpus": asked("--query-gpu=uuid,memory.used,memory.total")}


def binds(options: argparse.Namespace) -> dict[str, Any]:
    import ray

    graphs, submodel = options.pipelines[0] / options.name, options.submodel
    work = Path(tempfile.mkdtemp(prefix="binds-", dir=options.scratch))
    found: dict[str, Any] = {}
    with cluster(0, options.scratch) as address:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)

        @ray.remote(num_cpus=1, max_retries=0)
        def bound(number: int) -> dict[str, float]:
            sys.path.insert(0, str(ROOT))
            from sdflow.digest import digest_file
            from sdflow.manifest import read_manifest
            from sdflow.sources import PlainDigests, reopen_checkpoint
            from sdflow.weights.bind import BindRequest, bind

            checkpoint = reopen_checkpoint(read_manifest(graphs).origin, str(graphs), digests=PlainDigests())
            out = work / str(number)
            out.mkdir()
            begun = time.perf_counter()
            bind(BindRequest(submodel, graphs / submodel, checkpoint.submodels[submodel].load, []), out)
            made = time.perf_counter()
            files = [path for path in out.rglob("*") if path.is_file()]
            for path in files:
                digest_file(path)
            hashed = time.perf_counter()
            size = sum(path.stat().st_size for path in files)
            shutil.rmtree(out)
            return {"bind_s": made - begun, "hash_s": hashed - made, "bytes": float(size)}

        ray.get([bound.remote(1000 + number) for number in range(min(2, max(options.workers)))])  # imports, file cache
        for workers in options.workers:
            begun = time.perf_counter()
            each = ray.get([bound.remote(number) for number in range(workers)])
            seconds = time.perf_counter() - begun
            found[str(workers)] = {
                "seconds": seconds,
                "a_minute": 60 * workers / seconds,
                "gb_a_second": sum(one["bytes"] for one in each) / seconds / 1e9,
                "bind_s": statistics.median(one["bind_s"] for one in each),
                "hash_s": statistics.median(one["hash_s"] for one in each),
            }
            say(f"{workers} workers: {found[str(workers)]}")
            note(options, found)
    shutil.rmtree(work, ignore_errors=True)
    return found


PARTS = {"load": load, "lora": lora, "share": share, "binds": binds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("pipelines", type=Path, nargs="+")
    parser.add_argument("--name", help="of the pipeline in GRAPHS, for binds")
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--size", type=int)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gpus", type=float, default=1.0, help="per replica")
    parser.add_argument("--threads", type=int, default=1, help="per replica")
    parser.add_argument("--seconds", type=float, nargs="+", default=[15.0])
    parser.add_argument("--clients", type=int, nargs="+", default=[16], help="that wait, per replica")
    parser.add_argument("--kill-seconds", type=float, default=0.0, help="of arrivals in which a replica is killed")
    parser.add_argument("--kill-part", type=float, default=PART, help="of the capacity, meanwhile")
    parser.add_argument("--loras", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--submodel", default="unet")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--scratch", type=Path, help="for Ray's and other temporary files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    note(options, PARTS[options.part](options))


if __name__ == "__main__":
    main()
