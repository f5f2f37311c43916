"""What stands before every request: the key, the body's size, where a browser's request comes from, and the log's line."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sdflow.serve.api_error import ApiError
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

STALL_SECONDS = 30.0
"""How long nothing may move, in either direction."""

SLOWEST = 16 << 10
"""Bytes a second: a transfer may take `STALL_SECONDS` and what its bytes take at this rate. So one that drips ends."""

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/healthz", "/readyz", "/", "/docs")
"""Paths that need no key: they tell nothing but that the server is there. So is what the pages are made of."""

PAGE = "/page/"

MOST_DIGITS = 20
"""Of a Content-Length. Python refuses to read a number of more than 4,300."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Access:
    """Who may ask. key: None: anyone. origins: of pages of other servers that may. hosts: names of this server that a browser
    may know it by; None: any."""

    key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK


class Guard:
    """Around the whole application."""

    def __init__(self, app: App, access: Access, limits: Limits, metrics: Metrics, log: Callable[..., None]) -> None:
        self._app, self._access, self._metrics, self._log = app, access, metrics, log
        self._bodies = Bodies(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        taken: dict[str, Any] = scope.setdefault("state", {})

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, sent)
        finally:
            seconds = time.perf_counter() - begun
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            self._log(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status or "gone",
                seconds=round(seconds, 4),
                **taken.get("log", {}),
            )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        most = self._bodies.limits.body_of(scope["path"])
        try:
            self._require_own(headers)
            if not self._asks_first(scope["method"], headers):
                self._require_key(scope["path"], headers.get(b"authorization", b""))
            _require_body(headers.get(b"content-length", b"0"), most)
        except ApiError as error:
            self._metrics.refusals.labels("guard").inc()
            await answer(error, send)
            return
        begun, refused = False, False

        async def refuse(error: ApiError) -> Message:
            nonlocal refused
            refused = True
            self._metrics.refusals.labels("guard").inc()
            if not begun:
                await answer(error, send)
            return {"type": "http.disconnect"}

        async def once(message: Message) -> None:
            nonlocal begun
            if not refused:  # the application's answer to a request that was cut off
                begun = True
                await send(message)

        from starlette.requests import ClientDisconnect

        body = Body(self._bodies, scope["path"], receive, refuse)
        try:
            with suppress(ClientDisconnect):  # its body was cut off here, or by the client: nobody waits for an answer
                await self._app(scope, body.receive, once)
        finally:
            body.release()

    def _require_own(self, headers: dict[bytes, bytes]) -> None:
        """A page of another server must not use a browser to get here, nor a name that was made to point here."""
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        hosts = self._access.hosts
        if hosts is not None and _parts(f"//{host}").hostname not in hosts:
            raise ApiError(403, f"this server does not accept the Host {host!r}.", code="host")
        if origin and origin not in self._access.origins and _parts(origin).netloc != host:
            raise ApiError(403, f"requests from pages of {origin} are not allowed: see --cors-origin.", code="origin")

    def _asks_first(self, method: str, headers: dict[bytes, bytes]) -> bool:
        """Whether a browser asks for a page of an allowed server if it may send a key: it sends none with that."""
        allowed = headers.get(b"origin", b"").decode("latin-1") in self._access.origins
        return method == "OPTIONS" and allowed and b"access-control-request-method" in headers

    def _require_key(self, path: str, authorization: bytes) -> None:
        key = self._access.key
        if key is None or path in OPEN or path.startswith(PAGE):
            return
        kind, _, given = authorization.partition(b" ")
        if kind.lower() == b"basic":  # as clients of A1111's webui send it
            try:
                given = base64.b64decode(given).partition(b":")[2]
            except ValueError:
                given = b""
        if not hmac.compare_digest(given.strip(), key.encode()):
            raise ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY.", code="invalid_api_key")


def _parts(url: str) -> SplitResult:
    """Of what is no URL, as with half a pair of brackets, nothing."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _require_body(length: bytes, most: int) -> None:
    if not length.isdigit():
        raise ApiError(400, "Content-Length is no number.")
    if len(length.lstrip(b"0")) > MOST_DIGITS or int(length) > most:
        raise too_large(most)


async def answer(error: ApiError, send: Send) -> None:
    """Send an error."""
    content = error.response()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers()}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def log_line(event: str, **fields: Any) -> None:
    """One line of JSON on standard error. Where that cannot be written, as on a full disk, it is lost, and no request with it."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with suppress(OSError):
        sys.stderr.write(json.dumps({"time": stamp, "event": event, **fields}, ensure_ascii=False) + "\n")
        sys.stderr.flush()


def transfer_seconds(size: int) -> float:
    """How long so many bytes may take."""
    return STALL_SECONDS + size / SLOWEST


@dataclass
class Bodies:
    """Those that are being received or answered, of all requests. held: their bytes that are in memory."""

    limits: Limits
    held: int = 0


class Body:
    """Of one request. refuse: answers it with an error, unless an answer has begun; returns what the application receives."""

    def __init__(
        self, all_bodies: Bodies, path: str, receive: Receive, refuse: Callable[[ApiError], Awaitable[Message]]
    ) -> None:
        self._all, self._receive, self._refuse = all_bodies, receive, refuse
        self._most = all_bodies.limits.body_of(path)
        self._in_memory = path != all_bodies.limits.UPLOAD_PATH
        self._begun, self._received, self._held, self._whole = asyncio.get_running_loop().time(), 0, 0, False

    async def receive(self) -> Message:
        """The next message; a disconnection where the request was refused."""
        try:
            async with asyncio.timeout_at(self._end()):
                message = await self._receive()
        except TimeoutError:
            return await self._refuse(ApiError(408, "the request took too long to arrive.", code="too_slow"))
        size = len(message.get("body", b""))
        self._received += size
        self._whole = not message.get("more_body", False)
        if self._received > self._most:
            return await self._refuse(too_large(self._most))
        if self._in_memory:
            self._held += size
            self._all.held += size
            if self._all.held > self._all.limits.bodies:
                words = "the requests in memory have reached their limit. Try again."
                return await self._refuse(ApiError(503, words, code="overloaded", retry_after=5))
        return message

    def release(self) -> None:
        """The request was answered."""
        self._all.held -= self._held

    def _end(self) -> float | None:
        if self._whole:
            return None
        return min(asyncio.get_running_loop().time() + STALL_SECONDS, self._begun + transfer_seconds(self._received))


def too_large(most: int) -> ApiError:
    """The refusal of a body that has more bytes."""
    return ApiError(413, f"the request has more than {most} bytes.", code="body_too_large")
