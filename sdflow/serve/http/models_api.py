"""Pipelines of a running server: added, read again, removed. `GET /v1/models` is OpenAI's (`openai_api`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.callers import require_admin
from sdflow.serve.http.models import Additions
from sdflow.serve.http.openai_api import Served


class Addition(BaseModel):
    """A pipeline to add, or to read again."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"id": "shapes_cpu"}]})

    id: str = Field(
        max_length=255, description="Its folder's name below the server's --pipeline-folder, or one that is served."
    )


def model_routes(served: Served, additions: Additions | None) -> APIRouter:
    """The routes. additions: None: the pipelines stay as they are, as on a cluster."""
    routes = APIRouter(prefix="/v1", tags=["Pipelines"], dependencies=[Depends(require_admin)])

    def found() -> Additions:
        if additions is None:
            raise ApiError(400, "a server on a cluster keeps its pipelines: deploy it again.", code="not_supported")
        return additions

    @routes.post("/models", summary="Add a pipeline of the server's folder, or read one again", status_code=201)
    async def added(wanted: Addition) -> dict[str, Any]:
        if served.models.is_alias(wanted.id):
            raise ApiError(400, f"{wanted.id} is an alias here: take the pipeline's own name.", param="id")
        there = served.models.get(wanted.id)
        model = await run_in_threadpool(found().read, wanted.id, there)
        await served.drawing.load(model.name, model.folder.absolute())
        served.models.put(model)
        return model.to_json(served.drawing.most_pixels(model.name))

    @routes.delete("/models/{name}", summary="Offer it no more; what was begun with it is finished")
    async def removed(name: str) -> dict[str, Any]:
        found()
        served.models.remove(name)
        served.drawing.drop(name)
        return {"id": name, "object": "model", "deleted": True}

    return routes
