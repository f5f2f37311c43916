"""What `/openapi.json` says and `/docs` shows: an example of every request and every answer
(`api_examples.yaml`), and the errors as they come.

FastAPI knows the fields of requests. It knows neither the answers, which are made here by hand, nor that errors have
OpenAI's form: it would describe others, with a status that is never sent.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sdflow import __version__
from sdflow.families import DEFAULT, FAMILIES
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.webui_lists import EMPTY, REFRESHED, REFUSED
from sdflow.serve.limits import Limits

_EXAMPLES = yaml.safe_load(
    (Path(__file__).parent / "api_examples.yaml")
    .read_text(encoding="utf-8")
    .replace("DENOISER", FAMILIES[DEFAULT].denoiser)
)
ANSWERS: dict[tuple[str, str], Any] = {
    **{
        (method, path): _EXAMPLES["answers"][f"{method} {path}"]
        for method, path in map(str.split, _EXAMPLES["answers"])
    },
    ("get", "/sdapi/v1/cmd-flags"): {"api": True, **asdict(Limits())},
    **{("get", f"/sdapi/v1/{path}"): [] for path in EMPTY},
    **{("post", f"/sdapi/v1/{path}"): None for path in REFRESHED},
}
"""The answer to each request, as an example."""

STREAMED = ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations")
DRAWING = (*STREAMED, "/sdapi/v1/txt2img", "/sdapi/v1/img2img")


def _refusal(status: int, when: str, message: str, **more: Any) -> tuple[str, ApiError]:
    return when, ApiError(status, message, **more)


REFUSALS = {status: _refusal(status, **example) for status, example in _EXAMPLES["refusals"].items()}
"""By status: when it comes, and an example."""


def operation_id(route: Any) -> str:
    """What generated clients call an operation: of its method and path, so that it stays when code is moved."""
    return re.sub(r"\W+", "_", f"{min(route.methods).lower()}{route.path_format}").strip("_")


def describe(app: FastAPI) -> None:
    """Let the application tell its API so."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(
                get_openapi(title=app.title, version=__version__, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(made: dict[str, Any]) -> dict[str, Any]:
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(method, path, operation["responses"])
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{}, {"key": []}]
    return made


def _responses(method: str, path: str, own: dict[str, Any]) -> dict[str, Any]:
    good = next(status for status in own if status.startswith("2"))
    kind = "text/plain" if path == "/metrics" else "application/json"
    found = {}
    if path not in REFUSED:
        content = {kind: {"example": ANSWERS[method, path]}}
        if path in STREAMED:
            content["text/event-stream"] = {"example": _EXAMPLES["streamed"]}
        found[good] = {"description": "As in the example.", "content": content}
    for status in _refusals(method, path):
        about, error = REFUSALS[status]
        found[str(status)] = {"description": about, "content": {"application/json": {"example": error.body(path)}}}
    return found


def _refusals(method: str, path: str) -> tuple[int, ...]:
    if path == "/healthz":
        return ()
    if path == "/readyz":
        return (503,)
    named = (404,) if "{name}" in path or path == "/sdapi/v1/options" else ()
    if path.startswith("/v1/models") and method != "get":
        return (*((408, 409, 413) if method == "post" else ()), 400, 401, 403, 404, 500, 503)
    if method != "post":
        return 401, 403, *named, 500
    if path in DRAWING:
        return 400, 401, 403, 404, 408, 413, 429, 500, 503, 504
    sent = (409, 413, 500, 503, 507) if path == "/v1/loras" else (413, 500)
    return 400, 401, 403, *named, 408, *sent
