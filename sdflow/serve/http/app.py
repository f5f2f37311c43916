"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sdflow import __version__
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.admin_api import admin_routes
from sdflow.serve.http.api_document import describe, operation_id
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.guard import Guard, path_of
from sdflow.serve.http.openai_api import of_validation, openai_routes
from sdflow.serve.http.settings import Settings
from sdflow.serve.http.webui_api import webui_routes
from sdflow.serve.http.webui_lists import webui_lists
from sdflow.serve.jobs import Loaded, Lost, Message, Order, Ready
from sdflow.serve.metrics import Metrics
from sdflow.serve.tracing import Tracing
from sdflow.serve.worker.worker import WorkerLine

PAGE_FOLDER = Path(__file__).parents[1] / "page"
"""Files of the web page: index.html for `/`, the others under /page/."""


class Line(Protocol):
    """Connection to the worker that generates images, started and stopped with the application. Its messages go to the
    callback that it was made with."""

    def start(self) -> None: ...

    def send(self, message: Order) -> None: ...

    def end(self) -> None: ...


Hear = Callable[[Message], None]
"""Receives worker messages, from any thread."""


def make_app(settings: Settings, make_line: Callable[[Hear], Line] | None = None) -> Guard:
    """Return the ASGI application, which starts and stops the worker. make_line: connects to it; None: a local
    process."""
    metrics = Metrics()
    tracing = None if settings.traces is None else Tracing(settings.traces)
    drawing = Drawing(settings.limits, metrics)

    def hear(message: Message) -> None:
        drawing.hear(message)
        if isinstance(message, Lost):
            settings.log("worker_lost", kind=message.kind, what=message.what, where=message.where)
        elif isinstance(message, Ready):
            settings.log("ready", pipelines=drawing.found)
        elif isinstance(message, Loaded):
            settings.log("pipeline", name=message.name, loaded=message.found is not None, error=message.error)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def hear_from_thread(message: Message) -> None:
            loop.call_soon_threadsafe(hear, message)

        line = WorkerLine(settings.worker, hear_from_thread) if make_line is None else make_line(hear_from_thread)
        drawing.send = line.send
        line.start()
        yield
        await asyncio.to_thread(line.end)
        settings.loras.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    errors = ApiError, RequestValidationError, ValidationError, HTTPException, ClientDisconnect, Exception
    handlers: dict[int | type[Exception], Any] = dict.fromkeys(errors, _answer_error)
    app = FastAPI(
        title="sdflow",
        version=__version__,
        description="Generate images with pipelines built by sdflow: OpenAI's images API, and the API of A1111's webui.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads from a CDN and cannot send the key
        redoc_url=None,
        generate_unique_id_function=operation_id,
        exception_handlers=handlers,
    )
    routers = [routes(settings, drawing) for routes in (openai_routes, admin_routes, webui_routes)]
    routers.append(webui_lists(settings))
    for router in routers:
        app.include_router(router)
    _own_routes(app, drawing, metrics)
    describe(app)
    if settings.access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.access.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    return Guard(app, routers, settings, metrics, drawing, tracing)


def _own_routes(app: FastAPI, drawing: Drawing, metrics: Metrics) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["Server"], summary="Liveness probe")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["Server"], summary="Readiness probe: 200, or 503 while loading or draining")
    async def readyz() -> Response:
        if drawing.ready:
            return JSONResponse({"status": "ready", "pipelines": drawing.found})
        status = "draining" if drawing.draining else "loading"
        return JSONResponse({"status": status}, 503, {"Retry-After": "5"})

    @app.get("/metrics", tags=["Server"], summary="Prometheus metrics")
    async def figures() -> Response:
        metrics.ready.set(int(drawing.ready))  # also 0 while draining
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE_FOLDER / "index.html")

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(PAGE_FOLDER / "docs.html")

    app.mount("/page", StaticFiles(directory=PAGE_FOLDER), name="page")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the error in OpenAI's format, or in the webui's for its API."""
    path = path_of(request.scope)
    if isinstance(error, ApiError):
        found = error
    elif isinstance(error, RequestValidationError | ValidationError):
        found = of_validation(error, request.headers.get("content-type", ""))
    elif isinstance(error, HTTPException):
        words = f"{path} does not exist." if error.status_code == 404 else f"{error.detail.rstrip('.')}."
        found = ApiError(error.status_code, words)
        found.headers = error.headers
    elif isinstance(error, ClientDisconnect):
        found = ApiError(499, "the client disconnected.")
    else:
        found = ApiError(500, "Internal error; see the server's log.")
    return JSONResponse(found.body(path), found.status, found.headers)
