"""OpenAI's images API as its official client calls it: `/v1/images/generations`, `edits`, `variations`, and `/v1/models`."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, REUSE
from sdflow.prompts.wildcards import Wildcards
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.loras import Loras
from sdflow.serve.http.models import Models
from sdflow.serve.http.openai_fields import Edit, Fields, Generation, Variation, as_openai_form
from sdflow.serve.http.requested import find_model, jobs_of, size_of
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.http.uploads import as_mask, as_rgb, read_conditioning_images, read_upload, start_and_references
from sdflow.serve.jobs import Drawn, Image, Job, Preview, Stepped
from sdflow.serve.limits import Limits

EXACT_ONLY = "a server draws exact images; `sdflow generate` takes this"

NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
"""Nothing is charged here, so no tokens are counted."""


@dataclass(frozen=True)
class Served:
    """What the routes need."""

    models: Models
    drawing: Drawing
    limits: Limits
    loras: Loras
    log_prompts: bool = False
    wildcards: Wildcards | None = None
    embeddings: Path | None = None


def openai_routes(served: Served) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1")

    @routes.get(
        "/models", tags=["OpenAI"], summary="The pipelines, and whether they are verified", operation_id="listModels"
    )
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(model) for model in served.models.values()]}

    @routes.get("/models/{name}", tags=["OpenAI"], summary="One pipeline", operation_id="retrieveModel")
    async def model(name: str) -> dict[str, Any]:
        return described(served.models.get_named(name))

    def described(model: ServedModel) -> dict[str, Any]:
        return model.to_json(served.drawing.most_pixels(model.name))

    @routes.post("/images/generations", tags=["OpenAI"], summary="Draw from text", operation_id="createImage")
    async def generations(request: Request, fields: Generation) -> Response:
        return await drawn(served, request, fields, (), None, "image_generation")

    def form(fields: type[Edit]) -> dict[str, Any]:
        content = {"multipart/form-data": {"schema": as_openai_form(fields)}}
        return {"tags": ["OpenAI"], "openapi_extra": {"requestBody": {"content": content, "required": True}}}

    words = "Draw from an image, or into the masked part of it"

    @routes.post("/images/edits", summary=words, operation_id="createImageEdit", **form(Edit))
    async def edits(request: Request) -> Response:
        fields, images, mask = await read_form(request, served.limits, Edit)
        return await drawn(served, request, fields, images, mask, "image_edit")

    @routes.post(
        "/images/variations",
        summary="Draw an image like another",
        operation_id="createImageVariation",
        **form(Variation),
    )
    async def variations(request: Request) -> Response:
        fields, images, mask = await read_form(request, served.limits, Variation)
        return await drawn(served, request, fields, images, mask, "image_edit")

    return routes


async def read_form(request: Request, limits: Limits, kind: type[Edit]) -> tuple[Edit, list[Image], Image | None]:
    """The fields of a form, its images, and its mask: where there is none, the transparent part of the first image.

    Raises ApiError.
    """
    require_form(request)
    texts: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {"image": [], "mask": []}
    most = limits.conditioning_images + 4
    async with request.form(max_files=most, max_fields=100, max_part_size=limits.body) as form:
        for name, value in form.multi_items():
            name = name.removesuffix("[]")
            if isinstance(value, UploadFile) and name in files:
                files[name].append(await value.read())
            elif isinstance(value, UploadFile) or name in files:
                raise ApiError(400, f"{name} is {'a file' if name not in files else 'no file'}.", param=name)
            else:
                texts[name] = value
    for name, most in (("image", limits.conditioning_images + 1), ("mask", 1)):
        if len(files[name]) > most:
            raise ApiError(400, f"there are {len(files[name])} of {name}, and may be {most}.", param=name)
    if not files["image"]:
        raise ApiError(400, "there is no image.", param="image", code="missing")
    try:
        fields = kind.model_validate(texts)
    except (ValidationError, ValueError) as error:
        raise of_validation(error) from error
    read = {
        name: [await run_in_threadpool(read_upload, content, name, limits) for content in contents]
        for name, contents in files.items()
    }
    images, mask = read["image"], next(iter(read["mask"]), None)
    if mask is None and images[0].mode == "RGBA":
        mask = images[0]
    return fields, [as_rgb(each) for each in images], None if mask is None else as_mask(mask)


def require_form(request: Request) -> None:
    """Raises ApiError for a body of another kind, in which no file would be found."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise ApiError(
            400,
            f"the body is to be a form: multipart/form-data, not {kind or 'nothing'}.",
            code="unsupported_content_type",
        )


def of_validation(error: ValidationError | ValueError) -> ApiError:
    """The first thing that is wrong, in words."""
    if not isinstance(error, ValidationError):
        return ApiError(400, str(error))
    return of_problem(error.errors()[0])


def of_problem(problem: Mapping[str, Any]) -> ApiError:
    """One of pydantic's."""
    place = [str(each) for each in problem["loc"] if each != "body"]
    param, kind = ".".join(place) or None, problem["type"]
    words = problem["msg"]
    if kind == "extra_forbidden":
        words = EXACT_ONLY if param in (REUSE, GUIDANCE_INTERVAL) else "no such field is known"
    elif kind == "value_error":
        words = str(problem["ctx"]["error"])  # without pydantic's "Value error, "
    code = {"missing": "missing", "extra_forbidden": "unknown_parameter"}.get(kind, "invalid_value")
    return ApiError(400, f"{param}: {words}." if param else f"{words}.", param=param, code=code)


async def drawn(
    served: Served, request: Request, fields: Fields, images: Sequence[Image], mask: Image | None, kind: str
) -> Response:
    """The answer to a request: JSON, or events as they come. images: of an edit's files."""
    model = find_model(served.models, fields.model)
    image, references = start_and_references(fields, model, images, mask)
    jobs = await prepared(request, served, fields, model, image, mask, references)
    served.drawing.require_place(len(jobs))
    if fields.stream:
        events = _events(served, model, fields, jobs, kind)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    done = await wanted_still(request, _all(served.drawing, jobs))
    data = [_datum(fields, job, done[job.index]) for job in jobs]
    return JSONResponse({"created": int(time.time()), "data": data, **_shared_fields(jobs, model), "usage": NO_USAGE})


async def prepared(
    request: Request,
    served: Served,
    fields: Fields,
    model: ServedModel,
    image: Image | None,
    mask: Image | None,
    references: tuple[Image, ...] = (),
) -> list[Job]:
    """The images of a request, noted for its log line. Raises ApiError."""
    wanted = [(lora.name, lora.scale) for lora in fields.loras]
    loras = await run_in_threadpool(served.loras.find, wanted) if wanted else ()
    conditioning = await run_in_threadpool(read_conditioning_images, fields, model, served.limits, references)
    most = served.drawing.most_pixels(model.name)
    jobs = jobs_of(fields, model, served.limits, most, image, mask, loras, conditioning, served.wildcards)
    request.state.log = {"pipeline": model.name, "images": len(jobs), "request": jobs[0].request}
    if jobs[0].loras:
        request.state.log["loras"] = {lora.name: lora.scale for lora in jobs[0].loras}
    if served.log_prompts:
        request.state.log |= {"prompt": jobs[0].prompt, "negative_prompt": jobs[0].negative_prompt}
    return jobs


async def wanted_still(request: Request, work: Any) -> Any:
    """What the coroutine gives; it is cancelled when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone away.")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _all(drawing: Drawing, jobs: Sequence[Job]) -> dict[int, Drawn]:
    return {message.index: message async for message in drawing.draw(jobs) if isinstance(message, Drawn)}


def _datum(fields: Fields, job: Job, image: Drawn) -> dict[str, Any]:
    encoded = b64encode(image.file).decode()
    more = {"seed": job.seed, "flagged": image.flagged, **_warnings(image)}
    if fields.response_format == "url":
        return {"url": f"data:image/{job.format.lower()};base64,{encoded}", **more}
    return {"b64_json": encoded, **more}


def _warnings(image: Drawn) -> dict[str, Any]:
    return {"warnings": list(image.warnings)} if image.warnings else {}


def _shared_fields(jobs: list[Job], model: ServedModel) -> dict[str, str]:
    """What an answer says of all its images."""
    return {
        "output_format": jobs[0].format.lower(),
        "size": size_of(jobs, model),
        "quality": "auto",
        "background": "opaque",
    }


async def _events(
    served: Served, model: ServedModel, fields: Fields, jobs: list[Job], kind: str
) -> AsyncIterator[bytes]:
    """In OpenAI's form; besides, each says of which image it is, and `progress` events say how far that is."""
    shared = _shared_fields(jobs, model)
    try:
        async for message in served.drawing.draw(jobs):
            common = {"created_at": int(time.time()), **shared, "image_index": message.index}
            if isinstance(message, Preview):
                yield _event(
                    f"{kind}.partial_image",
                    b64_json=b64encode(message.file).decode(),
                    partial_image_index=message.number,
                    **common,
                )
            elif isinstance(message, Stepped) and fields.progress:
                yield _event(f"{kind}.progress", done=message.done, total=message.total, **common)
            elif isinstance(message, Drawn):
                job = jobs[message.index]
                yield _event(
                    f"{kind}.completed",
                    b64_json=b64encode(message.file).decode(),
                    seed=job.seed,
                    flagged=message.flagged,
                    usage=NO_USAGE,
                    **_warnings(message),
                    **common,
                )
    except ApiError as error:
        yield _event("error", **error.body())


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
