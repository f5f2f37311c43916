"""Watch a server's memory over an hour of requests that differ in steps, guidance, size, start image and LoRAs.

    python benchmarks/serve/serve_soak.py PIPELINE --rate 0.4 [--seconds 3600] [--loras DIR --cache DIR --lanes 2]
        [--large 512x512]

--rate: random arrivals per second on average; --every SECONDS: one after each such pause instead, for a busy machine.
With LoRAs, they are also uploaded, used and deleted one by one. --large: every five minutes an image of this size,
whose memory the worker should release. Every half minute it prints the answered and rejected requests and the resident
memory of each server process. At the end it prints memory at the start, by thirds, and at the end, and whether it
stayed flat: after the first third it grows by at most a tenth. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.serve.serve_load import load, quantile, sdflow_server

LOOK_SECONDS = 30.0
GUEST_SECONDS, LARGE_SECONDS = 5.0, 300.0
SETTLE_SECONDS = 15.0
"""After a large image, the worker gives its memory back within ten seconds."""
PROMPT = "a large red circle on a blue background"


@dataclass
class Seen:
    """What became of the requests so far."""

    took: list[float] = field(default_factory=list)
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    image: bytes | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    arrivals = parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument("--rate", type=float, help="requests a second, at random")
    arrivals.add_argument("--every", type=float, metavar="SECONDS", help="between two requests")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loras", type=Path, help="the folder that they are in")
    parser.add_argument("--cache", type=Path, help="that the pipeline was built with; without it, sdflow's own")
    parser.add_argument("--large", help="WIDTHxHEIGHT of an image every five minutes")
    parser.add_argument("--lanes", help="of the server; without it, one")
    given = parser.parse_args()
    more = ["--loras", str(given.loras)] if given.loras else []
    more += ["--lanes", given.lanes] if given.lanes else []
    with sdflow_server(given.pipeline, given.cache, *more) as server:
        asyncio.run(soak(server.url, given))


async def soak(url: str, given: Any) -> None:
    """Arrivals at random, whatever the server does, and looks at its memory beside them."""
    chance, seen, begun = random.Random(given.seed), Seen(), time.perf_counter()
    names = [path.stem for path in sorted(given.loras.glob("*.safetensors"))] if given.loras else []

    def pause() -> float:
        return chance.expovariate(given.rate) if given.every is None else float(given.every)

    rows = [row(seen, 0.0)]

    async def look() -> None:
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, begun + number * LOOK_SECONDS - time.perf_counter()))
            rows.append(row(seen, time.perf_counter() - begun))

    looking = [asyncio.create_task(look())]
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        found = (await client.get("/readyz")).json()["pipelines"]
        print("; ".join(f"{name}: {each['lanes']} lanes" for name, each in found.items()), flush=True)
        if names:
            looking.append(asyncio.create_task(come_and_go(client, given.loras, names, seen, given.every or 0.0)))
        if given.large:
            looking.append(asyncio.create_task(large_ones(client, given.large)))
        async with asyncio.TaskGroup() as tasks:
            due = begun + pause()
            while due < begun + given.seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(ask(client, due, varied(chance, names), seen))
                due += pause()
    for each in looking:
        each.cancel()
    await asyncio.gather(*looking, return_exceptions=True)
    await asyncio.sleep(SETTLE_SECONDS)
    rows.append(row(seen, time.perf_counter() - begun))
    print(f"p50 {quantile(seen.took, 0.5):.2f} s, p95 {quantile(seen.took, 0.95):.2f} s; {load()}")
    for what in sorted(set(seen.failed)):
        print(f"{seen.failed.count(what)} failed: {what}")
    print("| minute | answered | refused | failed | MB of each process |\n|---|---|---|---|---|")
    for part in range(4):
        wanted = part * given.seconds / 3
        minute, *counts, memory = min(rows, key=lambda each: abs(each[0] * 60 - wanted))
        print(f"| {minute:.0f} | {' | '.join(map(str, counts))} | {memory} |")
    of_worker = [(each[0] * 60, float(each[4].split(",")[0])) for each in rows]
    early = [size for seconds, size in of_worker if 0 < seconds <= max(given.seconds / 3, 2 * LOOK_SECONDS)]
    first, last = quantile(early, 0.5), of_worker[-1][1]
    print(f"{last:.0f} MB at the end, {first:.0f} in the middle of the first third")
    if last > 1.1 * first or seen.failed:
        raise SystemExit(1)


async def come_and_go(client: httpx.AsyncClient, folder: Path, names: Sequence[str], seen: Seen, pause: float) -> None:
    """LoRAs that are sent, used and deleted, one after the other. pause: seconds between two, at least."""
    for number in itertools.count():
        source, name = names[number % len(names)], f"guest-{number}"
        content = (folder / f"{source}.safetensors").read_bytes()
        sent = await client.post("/v1/loras", data={"name": name}, files={"file": (f"{name}.safetensors", content)})
        sent.raise_for_status()
        body = {"prompt": PROMPT, "steps": 4, "loras": [{"name": name, "scale": 0.5 + number % 50 / 100}]}
        await ask(client, time.perf_counter(), body, seen)
        (await client.delete(f"/v1/loras/{name}")).raise_for_status()
        await asyncio.sleep(max(GUEST_SECONDS, pause))


async def large_ones(client: httpx.AsyncClient, size: str) -> None:
    """The worker's memory before each, at most, and some time after."""
    while True:
        before, most = largest(), 0.0
        body = {"prompt": PROMPT, "size": size, "steps": 2}
        drawing = asyncio.create_task(client.post("/v1/images/generations", json=body))
        while not drawing.done():
            most = max(most, largest())
            await asyncio.sleep(0.1)
        status = drawing.result().status_code
        await asyncio.sleep(SETTLE_SECONDS)
        print(f"{size} ({status}): {before:.0f} MB before, {most:.0f} at most, {largest():.0f} after", flush=True)
        await asyncio.sleep(LARGE_SECONDS)


def largest() -> float:
    """MB of the process that draws."""
    return float(memory().split(",")[0])


def row(seen: Seen, seconds: float) -> tuple[float, int, int, int, str]:
    """Printed, and kept for the table."""
    found = seconds / 60, len(seen.took), seen.refused, len(seen.failed), memory()
    print(f"{found[0]:.1f} min: {found[1]} answered, {found[2]} refused, {found[3]} failed; {found[4]}", flush=True)
    return found


def memory() -> str:
    """Of the server's processes, the largest first."""
    own = [each for each in psutil.Process().children(recursive=True) if each.name() != "cat"]
    return ", ".join(f"{size:.0f}" for size in sorted((each.memory_info().rss / 2**20 for each in own), reverse=True))


def varied(chance: random.Random, names: Sequence[str]) -> dict[str, Any]:
    """A request that differs from others in what makes sessions, tables and weights. Some go on from the last image."""
    loras = [{"name": name, "scale": chance.choice((0.5, 0.7, 1.0))} for name in names if chance.random() < 0.5]
    size = {"size": f"{chance.choice((96, 128))}x128"} if chance.random() < 0.2 else {}
    more = {"guidance_scale": chance.choice((1.0, 5.0, 7.5)), "seed": chance.randrange(1000), "loras": loras}
    start = {"strength": chance.choice((0.5, 0.8))} if chance.random() < 0.2 else {}
    return {"prompt": PROMPT, **more, **size, **start, "steps": chance.randrange(2, 16)}


async def ask(client: httpx.AsyncClient, due: float, body: dict[str, Any], seen: Seen) -> None:
    """From when it was due."""
    if "strength" in body and seen.image is not None:
        import json

        form = {name: json.dumps(value) if name == "loras" else str(value) for name, value in body.items()}
        file = {"image": ("image.png", seen.image, "image/png")}
        answer = await client.post("/v1/images/edits", data=form, files=file)
    else:
        body.pop("strength", None)
        answer = await client.post("/v1/images/generations", json=body)
    if answer.status_code == 429:
        seen.refused += 1
    elif answer.is_success:
        seen.took.append(time.perf_counter() - due)
        seen.image = b64decode(answer.json()["data"][0]["b64_json"])
    else:
        seen.failed.append(f"{answer.status_code}: {answer.text[:200]}")


if __name__ == "__main__":
    main()
