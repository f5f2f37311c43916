"""`/v1/loras`: which LoRAs a request may name; sending one, and taking one away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.callers import require_admin
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.openai_api import require_form
from sdflow.serve.limits import Limits

_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "A .safetensors file."},
        "name": {"type": "string", "description": "Default: the file's."},
    },
    "examples": [{"name": "ink"}],
}


def lora_routes(loras: Loras, forget: Callable[[Path], None]) -> APIRouter:
    """The routes. forget: releases what is kept of a LoRA's file."""
    routes = APIRouter(prefix="/v1", tags=["LoRAs"])

    @routes.get("/loras", summary="Those that are there")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": await run_in_threadpool(loras.to_json)}

    admin = [Depends(require_admin)]
    body = {"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}, "required": True}}

    @routes.post(
        "/loras",
        summary="Send one; it is there until the server ends",
        status_code=201,
        openapi_extra=body,
        dependencies=admin,
    )
    async def sent(request: Request) -> dict[str, Any]:
        require_form(request)
        with loras.receiving(_size(request, loras.limits)):
            async with request.form(max_files=1, max_fields=4) as form:
                file, name = form.get("file"), form.get("name")
                if not isinstance(file, UploadFile):
                    raise ApiError(400, "there is no file.", param="file", code="missing")
                named = name if isinstance(name, str) else file.filename or ""
                return await run_in_threadpool(loras.add, named, file.file)

    @routes.delete(
        "/loras/{name}", summary="Offer it no more; a file of the server's folder stays on disk", dependencies=admin
    )
    async def removed(name: str) -> dict[str, Any]:
        forget(loras.remove(name))
        return {"id": name, "object": "lora", "deleted": True}

    return routes


def _size(request: Request, limits: Limits) -> int:
    """Of a body that is still to come, at most."""
    chunked = "transfer-encoding" in request.headers
    return limits.lora_bytes if chunked else int(request.headers.get("content-length", "0"))
