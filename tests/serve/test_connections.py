"""Clients that do not go on, against the server's own protocol on real sockets: each is cut off, and there are only so many."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvicorn
from until import PATIENCE

from sdflow.serve.http.app import make_app
from sdflow.serve.http.connection import Connection
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.server import listen
from sdflow.serve.http.settings import Settings
from sdflow.serve.jobs import WorkerOptions
from sdflow.serve.keys import Access, Keys
from sdflow.serve.limits import Limits

HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"
LARGE = 64 << 20
"""Bytes of an answer that no socket's buffer takes whole."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdflow.serve.http.guard.STALL_SECONDS", 0.5)
    monkeypatch.setattr("sdflow.serve.http.guard.SLOWEST", 1 << 40)
    monkeypatch.setattr("sdflow.serve.http.connection.HEAD_SECONDS", 0.5)


@contextmanager
def application(key: str | None = None, **limits: int) -> Iterator[Any]:
    """The server's, without pipelines: nothing is drawn here."""
    loras = Loras(None)
    settings = Settings(
        Models({}),
        WorkerOptions({}),
        Access(None if key is None else Keys((key,))),
        Limits(**limits),
        loras,
        log=lambda event, **fields: None,
    )
    yield make_app(settings)
    loras.close()


@asynccontextmanager
async def serving(app: Any, connections: int | None = None) -> AsyncIterator[uvicorn.Server]:
    """uvicorn with our connections, as `serve` has it; its socket is in `servers`."""
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_level="error", limit_concurrency=connections
    )
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listening:
        running = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server
        server.should_exit = True
        await running


async def opened(server: uvicorn.Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())


async def dripping(writer: asyncio.StreamWriter) -> None:
    """One byte after the other, until the connection is closed."""
    try:
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        return


async def cut_off(server: uvicorn.Server, beginning: bytes) -> bytes:
    """What a client that drips after this beginning reads, until it is cut off."""
    reader, writer = await opened(server)
    writer.write(beginning)
    drips = asyncio.create_task(dripping(writer))
    read = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while piece := await reader.read(1000):
                read += piece
    except ConnectionResetError:
        pass
    await asyncio.wait_for(drips, PATIENCE)
    writer.close()
    return read


def test_a_head_or_body_that_drips_is_cut_off() -> None:
    async def tried() -> None:
        with application() as app:
            async with serving(app) as server:
                assert b" 408 " in await cut_off(server, HEAD + b"\r\n{")
                assert await cut_off(server, b"GET / HTTP/1.1\r\nX:") == b""

    asyncio.run(tried())


def test_who_goes_on_with_a_request_that_was_answered_is_cut_off() -> None:
    async def tried() -> None:
        with application("secret") as app:
            async with serving(app) as server:
                assert b" 401 " in await cut_off(server, HEAD + b"\r\n{")

    asyncio.run(tried())


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def test_who_does_not_read_its_answer_is_cut_off() -> None:
    """Within a streamed answer, and behind one that was written at once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(LARGE).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces = 64 if scope["path"] == "/stream" else 1
        for number in range(pieces):
            await send({"type": "http.response.body", "body": bytes(LARGE // pieces), "more_body": number < pieces - 1})

    async def tried() -> None:
        async with serving(app) as server:
            for path in (b"/stream", b"/whole"):
                reader, writer = await opened(server)
                writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), PATIENCE)
                writer.transport.pause_reading()
                await until(lambda: not server.server_state.connections)
                writer.transport.abort()

    asyncio.run(tried())


def test_a_connection_too_many_is_told_so_and_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next one is taken as soon as there is a place. The answer and the log have the same request id."""
    monkeypatch.setattr("sdflow.serve.http.connection.HEAD_SECONDS", PATIENCE)
    most, ids = 4, list[str]()

    async def tried() -> None:
        with application() as app:
            async with serving(app, most) as server:
                held = [await opened(server) for _ in range(most)]
                await until(lambda: len(server.server_state.connections) == most)
                for _ in range(3 * most):
                    reader, writer = await opened(server)
                    writer.write(HEAD)
                    answer = await asyncio.wait_for(reader.read(), PATIENCE)
                    head, _, body = answer.partition(b"\r\n\r\n")
                    assert b" 503 " in head and b"Retry-After: " in head
                    assert json.loads(body)["error"]["message"] == "Too many open connections."
                    found = re.search(rb"\r\nX-Request-ID: (\w{32})", head)
                    assert found is not None
                    ids.append(found[1].decode())
                    writer.close()
                held[0][1].close()
                await until(lambda: len(server.server_state.connections) < most)
                reader, writer = await opened(server)
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
                for _, each in [*held, (reader, writer)]:
                    each.close()

    asyncio.run(tried())
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["id"] for line in logged if line["event"] == "connection_refused"] == ids


def test_all_bodies_together_stay_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of the largest; what was answered counts no more."""
    monkeypatch.setattr("sdflow.serve.http.guard.STALL_SECONDS", PATIENCE)

    async def tried() -> None:
        with application(body=1000) as app:
            async with serving(app) as server:
                for _ in range(2):
                    held = [await opened(server) for _ in range(10)]
                    for _, writer in held:
                        writer.write(HEAD + b"\r\n" + b" " * 890)
                    answers = [asyncio.create_task(reader.read(1000)) for reader, _ in held]
                    done, _ = await asyncio.wait(answers, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                    answer = (await next(iter(done))).lower()
                    assert b" 503 " in answer and b"retry-after: " in answer
                    for _, writer in held:
                        writer.close()
                    await asyncio.gather(*answers, return_exceptions=True)
                    await until(lambda: not server.server_state.tasks)

    asyncio.run(tried())
