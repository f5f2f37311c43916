"""The content of `/openapi.json` and `/docs`: an example of every request, answer (`api_examples.yaml`) and error.

FastAPI only knows the fields of requests. It does not know the answers, which are built by hand, or that errors have
OpenAI's format: it would document its own, with a status that is never sent.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI

from sdflow.families import DEFAULT, FAMILIES
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import Edit, Variation
from sdflow.serve.http.webui_lists import EMPTY, REFRESHED, REFUSED, SDAPI
from sdflow.serve.limits import Limits

_TEXT = (Path(__file__).parent / "api_examples.yaml").read_text(encoding="utf-8")
_EXAMPLES = yaml.safe_load(_TEXT.replace("DENOISER", FAMILIES[DEFAULT].denoiser))
ONE_PIXEL = _EXAMPLES["requests"]["PngInfo"]["image"]
"""A PNG file, base64-encoded."""

ANSWERS: dict[str, Any] = {
    **_EXAMPLES["answers"],
    f"get {SDAPI}/cmd-flags": {"api": True, **asdict(Limits())},
    **{f"get {SDAPI}/{path}": [] for path in EMPTY},
    **{f"post {SDAPI}/{path}": None for path in REFRESHED},
}
"""Example answer by method and path."""

STREAMED = ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations")
DRAWING = (*STREAMED, f"{SDAPI}/txt2img", f"{SDAPI}/img2img")


def operation_id(route: Any) -> str:
    """Return the operation name for generated clients, from method and path, which do not change when code moves."""
    return re.sub(r"\W+", "_", f"{min(route.methods).lower()}{route.path_format}").strip("_")


def describe(app: FastAPI) -> None:
    """Replace the application's OpenAPI document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = FastAPI.openapi(app)
            for path, operations in made["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = _responses(method, path, operation["responses"])
            schemas = made["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for name, example in _EXAMPLES["requests"].items():
                schemas[name]["examples"] = [example]
            for path, form in _forms().items():
                body = {"content": {"multipart/form-data": {"schema": form}}, "required": True}
                made["paths"][path]["post"]["requestBody"] = body
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{}, {"key": []}]
        return FastAPI.openapi(app)

    app.openapi = document  # type: ignore[method-assign]


def _forms() -> dict[str, Any]:
    found, image = {"/v1/loras": _EXAMPLES["forms"]["loras"]}, _EXAMPLES["forms"]["image"]
    for path, kind in (("/v1/images/edits", Edit), ("/v1/images/variations", Variation)):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        schema["properties"] = {**image["files"], **schema["properties"], **image["as_json"]}
        schema["required"] = ["image", *schema.get("required", ())]
        found[path] = {**schema, "examples": image["examples"]}
    return found


def _responses(method: str, path: str, own: dict[str, Any]) -> dict[str, Any]:
    found = {}
    if path not in REFUSED:
        kind = "text/plain" if path == "/metrics" else "application/json"
        content = {kind: {"example": ANSWERS[f"{method} {path}"]}}
        if path in STREAMED:
            content["text/event-stream"] = {"example": _EXAMPLES["streamed"]}
        good = next(status for status in own if status.startswith("2"))
        found[good] = {"description": "Success; see the example.", "content": content}
    for status in _refusals(method, path):
        error = dict(_EXAMPLES["refusals"][status])
        about, example = error.pop("when"), ApiError(status, **error).body(path)
        found[str(status)] = {"description": about, "content": {"application/json": {"example": example}}}
    return found


def _refusals(method: str, path: str) -> tuple[int, ...]:
    if path == "/healthz":
        return ()
    if path == "/readyz":
        return (503,)
    named = (404,) if "{name}" in path or path == f"{SDAPI}/options" else ()
    if path.startswith("/v1/models") and method != "get":
        return (*((408, 409, 413) if method == "post" else ()), 400, 401, 403, 404, 500, 503)
    if method != "post":
        return 401, 403, *named, 500
    if path in DRAWING:
        return 400, 401, 403, 404, 408, 413, 429, 500, 503, 504
    sent = (409, 413, 500, 503, 507) if path == "/v1/loras" else (413, 500)
    return 400, 401, 403, *named, 408, *sent
