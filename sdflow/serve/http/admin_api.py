"""Administration of a running server: `/v1/loras` and `/v1/models`, whose `GET` is OpenAI's (`openai_api`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.models import Additions
from sdflow.serve.http.openai_api import require_form
from sdflow.serve.http.openai_fields import Strict
from sdflow.serve.http.settings import Settings


class Addition(Strict):
    """A pipeline to add or reload."""

    id: str = Field(
        max_length=255, description="Name of a folder in the server's --pipeline-folder, or of a served pipeline."
    )


def require_admin(request: Request) -> None:
    if not request.state.caller.administers:
        raise ApiError(403, "This request requires an administrator's key.", code="admin_key_required")


def admin_routes(settings: Settings, drawing: Drawing) -> APIRouter:
    """Return the routes for administrators and the list of LoRAs."""
    routes, loras, models = APIRouter(prefix="/v1"), settings.loras, settings.models
    admin = [Depends(require_admin)]

    @routes.get("/loras", tags=["LoRAs"], summary="List LoRAs")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": await run_in_threadpool(loras.to_json)}

    words = "Upload a LoRA; it is kept until the server stops"

    @routes.post("/loras", tags=["LoRAs"], summary=words, status_code=201, dependencies=admin)
    async def sent(request: Request) -> dict[str, Any]:
        require_form(request)
        chunked, length = "transfer-encoding" in request.headers, request.headers.get("content-length", "0")
        with loras.receiving(loras.limits.lora_bytes if chunked else int(length)):
            async with request.form(max_files=1, max_fields=4) as form:
                file, name = form.get("file"), form.get("name")
                if not isinstance(file, UploadFile):
                    raise invalid("file", "the form has no file.", code="missing")
                named = name if isinstance(name, str) else file.filename or ""
                return await run_in_threadpool(loras.add, named, file.file)

    words = "Remove a LoRA; files in the server's folder stay on disk"

    @routes.delete("/loras/{name}", tags=["LoRAs"], summary=words, dependencies=admin)
    async def removed(name: str) -> dict[str, Any]:
        drawing.forget(loras.remove(name))
        return {"id": name, "object": "lora", "deleted": True}

    def additions() -> Additions:
        if settings.additions is None:
            raise ApiError(
                400, "The pipelines of a server on a cluster cannot change; deploy it again.", code="not_supported"
            )
        return settings.additions

    words = "Add a pipeline from the server's folder, or reload one"

    @routes.post("/models", tags=["Pipelines"], summary=words, status_code=201, dependencies=admin)
    async def added(wanted: Addition) -> dict[str, Any]:
        if wanted.id in models.aliases:
            raise invalid("id", f"{wanted.id} is an alias; use the pipeline's own name.")
        model = await run_in_threadpool(additions().read, wanted.id, models.get(wanted.id))
        await drawing.load(model.name, model.folder.absolute())
        models.put(model)
        return model.to_json(drawing.most_pixels(model.name))

    words = "Remove a pipeline; its running requests finish"

    @routes.delete("/models/{name}", tags=["Pipelines"], summary=words, dependencies=admin)
    async def dropped(name: str) -> dict[str, Any]:
        additions()
        models.remove(name)
        drawing.drop(name)
        return {"id": name, "object": "model", "deleted": True}

    return routes
