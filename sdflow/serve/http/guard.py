"""What stands before every request: its id, the key, the body's size, where a browser's request comes from, the log's line."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from sdflow.serve.api_error import ApiError
from sdflow.serve.keys import Access, Caller
from sdflow.serve.limits import Limits
from sdflow.serve.metrics import Metrics

if TYPE_CHECKING:
    from sdflow.serve.http.drawing import Drawing
    from sdflow.serve.tracing import Tracing

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

PROBES = ("/healthz", "/readyz", "/metrics")
"""Paths that are asked for all the time: their requests are not logged."""

PAGE = "/page/"

MOST_DIGITS = 20
"""Of a Content-Length. Python refuses to read a number of more than 4,300."""

ID = b"x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

CSP = "; ".join(
    [
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:",
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
"""Of every answer."""
_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """Around the whole application. drawing: of its requests, for whoever runs it."""

    def __init__(
        self,
        app: App,
        access: Access,
        limits: Limits,
        metrics: Metrics,
        log: Callable[..., None],
        drawing: Drawing,
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._access, self._metrics, self._log = app, access, metrics, log
        self._bodies, self._tracing, self.drawing = Bodies(limits), tracing, drawing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        headers = {name.lower(): value for name, value in scope["headers"]}
        taken: dict[str, Any] = scope.setdefault("state", {})
        given = headers.get(ID, b"").decode("latin-1")
        taken["id"] = given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex
        span = None if self._tracing is None else self._tracing.begin(scope["method"], scope["path"], headers, taken)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID, taken["id"].encode()), *_ENCODED]
            await send(message)

        path = path_of(scope)
        try:
            await self._guarded(scope, path, headers, receive, sent)
        finally:
            seconds, said = time.perf_counter() - begun, taken.get("log", {})
            route, pipeline = getattr(scope.get("route"), "path", "other"), said.get("pipeline", "")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route, pipeline, status).observe(seconds)
            if span is not None:
                span.end(route, status, said)
            if path not in PROBES:
                fields = {"path": scope["path"], "status": status or "gone", "seconds": round(seconds, 4), **said}
                client = (scope.get("client") or ("",))[0]
                self._log("request", id=taken["id"], client=client, method=scope["method"], **fields)

    async def _guarded(
        self, scope: Scope, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """path: behind the prefix."""
        most = self._bodies.limits.body_of(path)
        try:
            self._require_own(headers)
            if not self._asks_first(scope["method"], headers):
                scope["state"]["caller"] = self._caller(path, headers.get(b"authorization", b""))
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

        body = Body(self._bodies, path, receive, refuse)
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

    def _caller(self, path: str, authorization: bytes) -> Caller:
        """Who asks. Raises ApiError for nobody who may."""
        caller = self._access.caller(authorization)
        if caller is None and not (path in OPEN or path.startswith(PAGE)):
            raise ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY.", code="invalid_api_key")
        return caller or Caller("", administers=False)


def path_of(scope: Scope) -> str:
    """Of a request, behind the prefix of a proxy."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/")) or "/"


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
