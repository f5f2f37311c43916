"""Middleware for every request: id, authentication, body size, Host and Origin checks, and the log line."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Message, Receive, Scope, Send

from sdflow.serve.api_error import ApiError
from sdflow.serve.keys import Access, Caller
from sdflow.serve.metrics import Metrics

if TYPE_CHECKING:
    from sdflow.serve.http.drawing import Drawing
    from sdflow.serve.http.settings import Settings
    from sdflow.serve.tracing import Tracing

STALL_SECONDS = 30.0
"""Maximum time without progress, in either direction."""

SLOWEST = 16 << 10
"""Minimum bytes per second: a transfer may take `STALL_SECONDS` plus its bytes at this rate."""

OPEN = ("/healthz", "/readyz", "/", "/docs")
"""Paths without a key, like those below `PAGE`: they only reveal that the server exists."""

PAGE = "/page/"

UPLOADS = "/v1/loras"
"""The path whose bodies go to files; all others stay in memory."""

PROBES = ("/healthz", "/readyz", "/metrics")
"""Frequently polled paths, which are not logged."""

MOST_DIGITS = 20
"""Maximum digits of a Content-Length: Python refuses to parse more than 4,300."""

ID = b"x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Guard:
    """Middleware around the whole application. routers: included in it. drawing: open requests, for the server's
    shutdown. Ray Serve requires `routes`, `router` and `add_exception_handler`, as of a Starlette application."""

    def __init__(
        self,
        app: Starlette,
        routers: Iterable[Router],
        settings: Settings,
        metrics: Metrics,
        drawing: Drawing,
        tracing: Tracing | None,
    ) -> None:
        included = [route for router in (app.router, *routers) for route in router.routes]
        # FastAPI lists an included router as one route without a path, which Ray Serve cannot name.
        self.routes: list[BaseRoute] = [route for route in included if isinstance(route, Route | Mount)]
        self._app, self._settings, self._metrics, self._tracing = app, settings, metrics, tracing
        self.drawing = drawing
        self._in_memory = 0  # body bytes of all open requests

    @property
    def router(self) -> Router:
        """The application's router."""
        return self._app.router

    def add_exception_handler(self, kind: type[Exception], handler: Any) -> None:
        """Have the application answer exceptions of this kind with `handler`. Ray Serve adds one for its own."""
        self._app.add_exception_handler(kind, handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        headers = {name.lower(): value for name, value in scope["headers"]}
        state: dict[str, Any] = scope.setdefault("state", {})
        given = headers.get(ID, b"").decode("latin-1")
        state["id"] = given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex
        tracing, method = self._tracing, scope["method"]
        end_span = None if tracing is None else tracing.begin(method, scope["path"], headers, state["id"])

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID, state["id"].encode()), *HEADERS]
            await send(message)

        path = path_of(scope)
        try:
            await self._guarded(scope, path, headers, receive, sent)
        finally:
            seconds, said = time.perf_counter() - begun, state.get("log", {})
            route, pipeline = getattr(scope.get("route"), "path", "other"), said.get("pipeline", "")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route, pipeline, status).observe(seconds)
            if end_span is not None:
                end_span(route, status, said)
            if path not in PROBES:
                fields = {"path": scope["path"], "status": status or "gone", "seconds": round(seconds, 4), **said}
                client = (scope.get("client") or ("",))[0]
                self._settings.log("request", id=state["id"], client=client, method=method, **fields)

    async def _guarded(
        self, scope: Scope, path: str, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Check and run a request. path: without the proxy's prefix."""
        limits = self._settings.limits
        most = limits.lora_bytes if path == UPLOADS else limits.body
        try:
            scope["state"]["caller"] = _caller(self._settings.access, scope["method"], path, headers)
            length = headers.get(b"content-length", b"0")
            if not length.isdigit():
                raise ApiError(400, "Content-Length is not a number.")
            if len(length.lstrip(b"0")) > MOST_DIGITS or int(length) > most:
                raise _too_large(most)
        except ApiError as error:
            self._metrics.refusals.labels("guard").inc()
            await JSONResponse(error.body(path), error.status, error.headers)(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        begun, size, held, whole = loop.time(), 0, 0, False

        async def received() -> Message:
            """Receive the next message. The application answers an ApiError raised here."""
            nonlocal size, held, whole
            end = None if whole else min(loop.time() + STALL_SECONDS, begun + transfer_seconds(size))
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise self._refusal(ApiError(408, "The request took too long to arrive.", code="too_slow")) from None
            if message["type"] == "http.disconnect" and not whole:
                raise ApiError(499, "the client disconnected.")
            more = len(message.get("body", b""))
            size, whole = size + more, not message.get("more_body", False)
            if size > most:
                raise self._refusal(_too_large(most))
            if path != UPLOADS:
                held += more
                self._in_memory += more
                if self._in_memory > 8 * limits.body:
                    words = "Too many large requests at once. Try again."
                    raise self._refusal(ApiError(503, words, code="overloaded", retry_after=5))
            return message

        try:
            await self._app(scope, received, send)
        finally:
            self._in_memory -= held

    def _refusal(self, error: ApiError) -> ApiError:
        self._metrics.refusals.labels("guard").inc()
        return error


def _caller(access: Access, method: str, path: str, headers: Mapping[bytes, bytes]) -> Caller:
    """Return the authorized caller. Raises ApiError for others."""
    host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
    # Block cross-site requests and DNS rebinding.
    if access.hosts is not None and _parts(f"//{host}").hostname not in access.hosts:
        raise ApiError(403, f"Host {host!r} is not allowed; see --allowed-host.", code="host")
    if origin and origin not in access.origins and _parts(origin).netloc != host:
        raise ApiError(403, f"Origin {origin} is not allowed; see --cors-origin.", code="origin")
    caller = access.caller(headers.get(b"authorization", b""))
    # CORS preflight requests carry no key.
    asks_first = method == "OPTIONS" and origin in access.origins and b"access-control-request-method" in headers
    if caller is None and not asks_first and path not in OPEN and not path.startswith(PAGE):
        raise ApiError(401, "Missing or invalid key; send Authorization: Bearer KEY.", code="invalid_api_key")
    return caller or Caller("", administers=False)


def path_of(scope: Scope) -> str:
    """Return the request's path without the proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/")) or "/"


def _parts(url: str) -> SplitResult:
    """Split a URL; an invalid one, such as an unbalanced bracket, gives empty parts."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The request is larger than {most} bytes.", code="body_too_large")


def transfer_seconds(size: int) -> float:
    """Return the maximum duration of a transfer of this many bytes."""
    return STALL_SECONDS + size / SLOWEST
