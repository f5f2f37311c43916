"""Who may ask: the key, the names of the server, pages of other servers, how large a request is. Nothing is drawn."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from until import PATIENCE

from sdflow.serve.http.app import make_app
from sdflow.serve.http.connection import Connection
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.server import access_of, listen
from sdflow.serve.http.settings import Settings
from sdflow.serve.jobs import WorkerOptions
from sdflow.serve.keys import LOOPBACK, Access, Keys, read_keys
from sdflow.serve.limits import Limits
from sdflow.serve.log import log_line

PAGE = "https://page.example"
FIRST = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def ask(access: Access, path: str, method: str = "GET", *, body: int = 1000, **options: Any) -> httpx.Response:
    loras = Loras(None)
    settings = Settings(
        Models({}), WorkerOptions({}), access, Limits(body=body), loras, log=lambda event, **fields: None
    )
    transport = httpx.ASGITransport(app=make_app(settings))

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **options)

    try:
        return asyncio.run(answer())
    finally:
        loras.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: str, status: int) -> None:
    """DNS rebinding: the browser believes that it asks its own server, and so sends no origin of another."""
    answer = ask(Access(), "/healthz", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "host"


def test_beyond_this_machine_any_name_will_do_but_a_key_is_needed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    access = access_of("0.0.0.0", key, (), no_auth=False)
    headers = {"Host": "draws.example"}
    assert ask(access, "/v1/models", headers=headers).status_code == 401
    assert ask(access, "/v1/models", headers={**headers, "Authorization": "Bearer secret"}).status_code == 200
    assert access_of("127.0.0.1", None, (), no_auth=False).hosts == LOOPBACK


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:9000", "http://evil.example", "http://["])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_servers_may_not_ask(origin: str, method: str) -> None:
    answer = ask(Access(), "/v1/models", method, headers={"Origin": origin, **FIRST})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin")
    assert "access-control-allow-origin" not in answer.headers


def test_the_own_page_may() -> None:
    assert ask(Access(), "/v1/models", headers={"Origin": "http://127.0.0.1:8000"}).status_code == 200


def test_pages_of_a_server_that_is_named_may_and_their_browser_may_ask_first_without_the_key() -> None:
    access = Access(Keys(("secret",)), (PAGE,))
    first = ask(access, "/v1/images/generations", "OPTIONS", headers={"Origin": PAGE, **FIRST})
    assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in first.headers["access-control-allow-headers"]
    headers = {"Origin": PAGE, "Authorization": "Bearer secret"}
    answer = ask(access, "/v1/models", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert ask(access, "/v1/models", headers={"Origin": PAGE}).status_code == 401
    assert ask(access, "/v1/models", "OPTIONS", headers=FIRST).status_code == 401
    other = {"Origin": "https://other.example", **FIRST}
    assert ask(access, "/v1/models", "OPTIONS", headers=other).status_code == 403


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, as bytes, by the function that is made for that, also where the length tells that it is wrong."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def seen(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return compare(given, key)

    monkeypatch.setattr("sdflow.serve.keys.hmac.compare_digest", seen)
    wanted = (("secret", 200), ("secre", 401), ("x", 401), ("", 401), ("secretsecret", 401))
    for given, status in wanted:
        headers = {"Authorization": f"Bearer {given}"}
        assert ask(Access(Keys(("secret",))), "/v1/models", headers=headers).status_code == status
    assert compared == [(given.encode(), b"secret") for given, _ in wanted]


def test_a_key_comes_as_a_bearers_or_a_password_only() -> None:
    """A gateway counts requests by the header: a key with any word before it would be counted apart."""
    access, password = Access(Keys(("secret",))), base64.b64encode(b"ann:secret").decode()
    wanted = (("bearer secret", True), (f"Basic {password}", True), ("Token secret", False), ("secret", False))
    for header, known in wanted:
        assert (access.caller(header.encode()) is not None) is known, header


def test_comments_and_a_byte_order_mark_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes("\ufeffann\n  # of the page\n\n bob \n".encode())
    assert read_keys(tmp_path / "keys") == ("ann", "bob")


FORM = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'


async def in_pieces(count: int) -> AsyncIterator[bytes]:
    yield FORM
    for _ in range(count):
        yield b" " * 100


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img"])
def test_a_request_that_is_too_large_is_refused(path: str) -> None:
    """By the length that it tells, and where it tells none, once more has come."""
    for content in (b" " * 1001, in_pieces(11)):
        headers = {"Content-Type": "multipart/form-data; boundary=x" if "edits" in path else "application/json"}
        answer = ask(Access(), path, "POST", content=content, headers=headers)
        assert answer.status_code == 413
        if "sdapi" in path:
            assert answer.json()["errors"] == "The request is larger than 1000 bytes."
        else:
            assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_go_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdflow.serve.http.guard.STALL_SECONDS", 0.1)
    sent: list[dict[str, Any]] = []
    loras = Loras(None)
    settings = Settings(Models({}), WorkerOptions({}), Access(), Limits(), loras, log=lambda event, **fields: None)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"100")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/images/generations",
        "headers": headers,
        "query_string": b"",
    }
    coming = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Any:
        if not coming:
            await asyncio.sleep(60)
        return coming.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_app(settings)(scope, receive, send))
    loras.close()
    assert [each.get("status") for each in sent] == [408, None]


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, and one that stops within its head; one that asks is answered, and asks again."""
    monkeypatch.setattr("sdflow.serve.http.connection.HEAD_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)  # longer than a head may take
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def answered_twice(place: tuple[str, int]) -> bool:
        """It is closed before, too, where this machine is held up for longer than a head may take."""
        reader, writer = await asyncio.open_connection(*place)
        try:
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 204 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        except (ConnectionError, asyncio.IncompleteReadError):
            return False
        finally:
            writer.close()
        return True

    async def tried() -> None:
        config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_level="error", port=0)
        with listen("127.0.0.1", 0) as listening:
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listening]))
            opened = [await asyncio.open_connection(*listening.getsockname()) for _ in range(2)]
            opened[1][1].write(b"GET / HTTP/1.1\r\nHost:")
            found = [await answered_twice(listening.getsockname())]
            while not found[-1] and len(found) < 5:
                found.append(await answered_twice(listening.getsockname()))
            assert found[-1]
            for reader, _ in opened:
                assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            for _, writer in opened:
                writer.close()
            server.should_exit = True
            await serving

    asyncio.run(tried())


def test_a_log_that_cannot_be_written_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        log_line("request", path="/")
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_a_length_that_is_none_is_refused() -> None:
    answer = ask(Access(), "/v1/images/generations", "POST", content=b"{}", headers={"Content-Length": "-5"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_routes_of_included_routers_are_listed_with_their_paths() -> None:
    """Ray Serve names requests by them, and logs an error for each request if a route has no path."""
    loras = Loras(None)
    app = make_app(Settings(Models({}), WorkerOptions({}), Access(), Limits(), loras))
    loras.close()
    paths = {getattr(route, "path", None) for route in app.routes}
    assert {"/healthz", "/page", "/v1/images/generations", "/v1/loras/{name}", "/sdapi/v1/txt2img"} <= paths
    assert None not in paths
