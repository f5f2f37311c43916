"""The servers that `sdflow serve` is compared with: a queue, a batch, one call of the pipeline for all of it.

    python benchmarks/serve/plain_server.py PIPELINE [--most 8]

Started by serve_load.py. Each request says how it wants to be batched: "most", the images of a batch (1: one at a
time), and "patience", the seconds for which the first waits for others. "beside": encode its file during the next call.
Batches have 1, 2, 4, ... images, as in `sdflow serve`; their sessions are created before the server is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import io
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

QUEUE = 32
"""Images waiting or running; further requests get 429."""

SHARE = 0.9
"""Fraction of free memory for sessions: those of all batch sizes stay, as in `sdflow serve`."""

Waiting = tuple[dict[str, Any], "asyncio.Future[Any]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--most", type=int, default=8, help="images of the largest batch")
    given = parser.parse_args()
    serve(given.pipeline, [1 << each for each in range(given.most.bit_length())])


def serve(folder: Path, sizes: Sequence[int]) -> None:
    import uvicorn
    from fastapi import FastAPI, HTTPException

    from sdflow.manifest import read_manifest
    from sdflow.runtime.denoiser import denoisers
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.serve.http.server import listen
    from sdflow.serve.log import log_line

    denoisers.SHARE = SHARE
    pipeline = Pipeline.load(folder, read_manifest(folder).origin.target)
    queue: asyncio.Queue[Waiting] = asyncio.Queue()
    drawing = ThreadPoolExecutor(1)  # on a GPU each thread makes what the libraries keep for one
    waiting, writing = 0, set[asyncio.Task[None]]()
    for size in sizes:
        drawing.submit(draw, pipeline, [{"prompt": "a", "seed": 0, "steps": 2}] * size).result()

    async def work() -> None:
        while True:
            batch = await next_batch(queue, sizes)
            images = await asyncio.get_running_loop().run_in_executor(
                drawing, draw, pipeline, [fields for fields, _ in batch]
            )
            for (fields, answer), image in zip(batch, images, strict=True):
                if fields.get("beside"):
                    task = asyncio.create_task(answered(answer, image))
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


async def next_batch(queue: asyncio.Queue[Waiting], sizes: Sequence[int]) -> list[Waiting]:
    """The first request and those that arrive while it waits, as many as there are sessions for; others stay queued."""
    batch, loop = [await queue.get()], asyncio.get_running_loop()
    most, end = batch[0][0].get("most", 1), loop.time() + batch[0][0].get("patience", 0.0)
    while len(batch) < most:
        try:
            batch.append(await asyncio.wait_for(queue.get(), max(0.0, end - loop.time())))
        except TimeoutError:
            break
    size = max(each for each in sizes if each <= len(batch))
    left, batch = batch[size:], batch[:size]
    queued = [queue.get_nowait() for _ in range(queue.qsize())]
    for each in [*left, *queued]:
        queue.put_nowait(each)
    return batch


def draw(pipeline: Any, wanted: Sequence[dict[str, Any]]) -> Sequence[Any]:
    """One call. Steps and guidance are the first one's: the load has the same for all."""
    import torch

    seeds = [torch.Generator().manual_seed(each["seed"]) for each in wanted]
    more = {"guidance_scale": wanted[0]["guidance_scale"]} if "guidance_scale" in wanted[0] else {}
    images: Sequence[Any] = pipeline(
        [each["prompt"] for each in wanted], generator=seeds, num_inference_steps=wanted[0]["steps"], **more
    ).images
    return images


def file_of(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
