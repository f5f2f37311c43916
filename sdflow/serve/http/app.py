"""The application: its routes, and what they have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from sdflow import __version__
from sdflow.prompts.wildcards import Wildcards
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.api_document import describe, operation_id
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.guard import Guard, path_of
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.loras_api import lora_routes
from sdflow.serve.http.models import NO_ADDITIONS, Additions, Models
from sdflow.serve.http.models_api import model_routes
from sdflow.serve.http.openai_api import Served, of_problem, openai_routes
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.http.webui_api import webui_routes
from sdflow.serve.http.webui_controlnet import controlnet_routes
from sdflow.serve.http.webui_lists import webui_lists
from sdflow.serve.jobs import Loaded, Lost, Message, Order, Ready, WorkerOptions
from sdflow.serve.keys import Access
from sdflow.serve.limits import Limits
from sdflow.serve.log import log_line
from sdflow.serve.metrics import Metrics
from sdflow.serve.tracing import Tracing
from sdflow.serve.worker.worker import WorkerLine

PAGE_FOLDER = Path(__file__).parents[1] / "page"
"""What `/` shows, as files: index.html, and what it names as /page/FILE."""


@dataclass(frozen=True)
class Settings:
    """Of a server. root_path: the prefix of its paths behind a proxy. traces: the collector that they are sent to."""

    models: Mapping[str, ServedModel]
    worker: WorkerOptions
    access: Access
    limits: Limits
    loras: Loras
    log_prompts: bool = False
    wildcards: Wildcards | None = None
    log: Callable[..., None] = log_line
    additions: Additions = NO_ADDITIONS
    root_path: str = ""
    traces: str | None = None


class Line(Protocol):
    """What draws, seen from the application: started and ended with it, told jobs; what it says goes to who made it."""

    def start(self) -> None: ...

    def send(self, message: Order) -> None: ...

    def end(self) -> None: ...


Hear = Callable[[Message], None]
"""Is told what is said; from any thread."""


def make_app(settings: Settings, make_line: Callable[[Hear], Line] | None = None) -> Any:
    """The ASGI application. What draws starts and ends with it. make_line: makes it; None: a worker process beside this one."""
    metrics = Metrics()
    tracing = None if settings.traces is None else Tracing(settings.traces)
    models = settings.models if isinstance(settings.models, Models) else Models(settings.models)
    line: Line | None = None

    def send(message: Any) -> None:
        assert line is not None, "it is there from the first request on"
        line.send(message)

    drawing = Drawing(settings.limits, metrics, send)

    def forget(lora: Path) -> None:
        if line is not None:  # without what draws, nothing was made with it
            drawing.forget(lora)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal line
        loop = asyncio.get_running_loop()

        def hear(message: Message) -> None:
            drawing.hear(message)
            if isinstance(message, Lost):
                settings.log("worker lost", kind=message.kind, what=message.what, where=message.where)
            elif isinstance(message, Ready):
                settings.log("ready", pipelines=drawing.found)
            elif isinstance(message, Loaded):
                settings.log("pipeline", name=message.name, loaded=message.found is not None, error=message.error)

        def hear_from_thread(message: Message) -> None:
            loop.call_soon_threadsafe(hear, message)

        line = WorkerLine(settings.worker, hear_from_thread) if make_line is None else make_line(hear_from_thread)
        line.start()
        yield
        await asyncio.to_thread(line.end)
        settings.loras.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="sdflow",
        version=__version__,
        description="Images from the pipelines that sdflow built: OpenAI's images API, and what clients of A1111's webui call.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's is loaded from elsewhere, and could not send the key
        redoc_url=None,
        generate_unique_id_function=operation_id,
    )
    served = Served(
        models,
        drawing,
        settings.limits,
        settings.loras,
        settings.log_prompts,
        settings.wildcards,
        settings.worker.embeddings,
    )
    app.include_router(openai_routes(served))
    app.include_router(model_routes(served, settings.additions if make_line is None else None))
    app.include_router(lora_routes(settings.loras, forget))
    for routes in (webui_routes(served), webui_lists(served), controlnet_routes(served.models)):
        app.include_router(routes)
    _own_routes(app, drawing, metrics)
    describe(app)
    _errors(app)
    if settings.access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.access.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    return Guard(app, settings.access, settings.limits, metrics, settings.log, drawing, tracing)


def _own_routes(app: FastAPI, drawing: Drawing, metrics: Metrics) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["Server"], summary="Whether the server answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["Server"], summary="Whether it draws: 200, else 503")
    async def readyz() -> Response:
        if drawing.ready:
            return JSONResponse({"status": "ready", "pipelines": drawing.found})
        status = "draining" if drawing.draining else "loading"
        return JSONResponse({"status": status}, 503, {"Retry-After": "5"})

    @app.get("/metrics", tags=["Server"], summary="For Prometheus")
    async def figures() -> Response:
        metrics.ready.set(int(drawing.ready))  # 0 while it drains, too
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    if (PAGE_FOLDER / "index.html").is_file():

        @app.head("/", include_in_schema=False)
        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(PAGE_FOLDER / "index.html")

        @app.head("/docs", include_in_schema=False)
        @app.get("/docs", include_in_schema=False)
        async def docs() -> Response:
            return FileResponse(PAGE_FOLDER / "docs.html")

        app.mount("/page", StaticFiles(directory=PAGE_FOLDER), name="page")


def _errors(app: FastAPI) -> None:
    """All of them in OpenAI's form; those of the webui's API in the webui's."""

    def answer(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error.body(path_of(request.scope)), error.status, headers or error.headers())

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            problem = {**problem, "loc": (), "msg": f"the body is no JSON: {problem['ctx']['error']}"}
        kind = request.headers.get("content-type", "")
        if problem["loc"] == ("body",) and "json" not in kind:
            words = f"the body is to be JSON: Content-Type application/json, not {kind or 'nothing'}."
            return answer(request, ApiError(400, words, code="unsupported_content_type"))
        return answer(request, of_problem(problem))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        words = (
            f"there is no {path_of(request.scope)} here."
            if error.status_code == 404
            else f"{str(error.detail).rstrip('.')}."
        )
        return answer(request, ApiError(error.status_code, words), error.headers or {})

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return answer(request, ApiError(500, "The server failed at this request; its log says why."))
