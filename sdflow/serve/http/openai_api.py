"""OpenAI's images API for its official client: `/v1/images/generations`, `edits`, `variations` and `/v1/models`."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, REUSE
from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.openai_fields import Edit, Fields, Generation, Variation
from sdflow.serve.http.requested import jobs_of
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.http.settings import Settings
from sdflow.serve.http.uploads import as_mask, as_rgb, read_conditioning_images, read_upload, start_and_references
from sdflow.serve.jobs import Drawn, Image, Job, Preview, Stepped
from sdflow.serve.limits import Limits

Result = TypeVar("Result")

EXACT_ONLY = "not available on a server, only in `sdflow generate`"

NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
"""Tokens are not counted, because nothing is billed."""


def openai_routes(settings: Settings, drawing: Drawing) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    @routes.get("/models", summary="List pipelines, with their verification status", operation_id="listModels")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(model) for model in settings.models.values()]}

    @routes.get("/models/{name}", summary="Get a pipeline", operation_id="retrieveModel")
    async def model(name: str) -> dict[str, Any]:
        return described(settings.models.get_named(name))

    def described(model: ServedModel) -> dict[str, Any]:
        return model.to_json(drawing.most_pixels(model.name))

    async def drawn(
        request: Request, fields: Fields, images: Sequence[Image] = (), mask: Image | None = None
    ) -> Response:
        """Return JSON or a stream of events. images: files of an edit."""
        model = settings.models.find(fields.model)
        image, references = start_and_references(fields, model, images, mask)
        jobs = await prepared(request, settings, drawing, fields, model, image, mask, references)
        drawing.require_place(len(jobs))
        side, given = model.latents.image_size, jobs[0].arguments
        shared = {
            "output_format": jobs[0].format.lower(),
            "size": f"{given.get('width', side)}x{given.get('height', side)}",
            "quality": "auto",
            "background": "opaque",
        }
        if fields.stream:
            kind = "image_edit" if isinstance(fields, Edit) else "image_generation"
            events = _events(drawing, jobs, kind, fields.progress, shared)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        done = await wanted_still(request, _all(drawing, jobs))
        data = []
        for job in jobs:
            encoded = b64encode(done[job.index].file).decode()
            if fields.response_format == "url":
                where = {"url": f"data:image/{job.format.lower()};base64,{encoded}"}
            else:
                where = {"b64_json": encoded}
            data.append({**where, **_said(job, done[job.index])})
        return JSONResponse({"created": int(time.time()), "data": data, **shared, "usage": NO_USAGE})

    @routes.post("/images/generations", summary="Generate images from text", operation_id="createImage")
    async def generations(request: Request, fields: Generation) -> Response:
        return await drawn(request, fields)

    words = "Edit an image, or its masked part"

    @routes.post("/images/edits", summary=words, operation_id="createImageEdit")
    async def edits(request: Request) -> Response:
        return await drawn(request, *await read_form(request, settings.limits, Edit))

    @routes.post("/images/variations", summary="Generate variations of an image", operation_id="createImageVariation")
    async def variations(request: Request) -> Response:
        return await drawn(request, *await read_form(request, settings.limits, Variation))

    return routes


async def read_form(request: Request, limits: Limits, kind: type[Edit]) -> tuple[Edit, list[Image], Image | None]:
    """Read a form's fields, images and mask. Without a mask, the transparent part of the first image is used.

    Raises ApiError, ValidationError.
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
                raise invalid(name, f"{name} must {'not ' if name not in files else ''}be a file.")
            else:
                texts[name] = value
    for name, most in (("image", limits.conditioning_images + 1), ("mask", 1)):
        if len(files[name]) > most:
            raise invalid(name, f"there are {len(files[name])} files named {name}; the maximum is {most}.")
    if not files["image"]:
        raise invalid("image", "an image is required.", code="missing")
    fields = kind.model_validate(texts)
    read = {
        name: [await run_in_threadpool(read_upload, content, name, limits) for content in contents]
        for name, contents in files.items()
    }
    images, mask = read["image"], next(iter(read["mask"]), None)
    if mask is None and images[0].mode == "RGBA":
        mask = images[0]
    return fields, [as_rgb(each) for each in images], None if mask is None else as_mask(mask)


def require_form(request: Request) -> None:
    """Raise ApiError if the body is not a multipart form, which would contain no file."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        words = f"Content-Type must be multipart/form-data, but is {kind or 'missing'}."
        raise invalid(None, words, code="unsupported_content_type")


def of_validation(error: RequestValidationError | ValidationError, content_type: str = "json") -> ApiError:
    """Convert the first validation error. content_type: of the request."""
    problem = error.errors()[0]
    of_body = isinstance(error, RequestValidationError) and problem["loc"][:1] == ("body",)
    place, kind, words = [str(each) for each in problem["loc"][of_body:]], problem["type"], problem["msg"]
    param = ".".join(place) or None
    if kind == "json_invalid":
        param, words = None, f"the body is not valid JSON: {problem['ctx']['error']}"
    elif of_body and not place and "json" not in content_type:
        words = f"Content-Type must be application/json, but is {content_type or 'missing'}."
        return invalid(None, words, code="unsupported_content_type")
    elif kind == "extra_forbidden":
        words = EXACT_ONLY if param in (REUSE, GUIDANCE_INTERVAL) else "unknown field"
    elif kind == "value_error":
        words = str(problem["ctx"]["error"])  # without pydantic's "Value error, "
    code = {"missing": "missing", "extra_forbidden": "unknown_parameter"}.get(kind)
    return invalid(param, f"{param}: {words}." if param else f"{words}.", code=code)


async def prepared(
    request: Request,
    settings: Settings,
    drawing: Drawing,
    fields: Fields,
    model: ServedModel,
    image: Image | None,
    mask: Image | None,
    references: tuple[Image, ...] = (),
) -> list[Job]:
    """Return a job for each image of a request and record the request for the log line. Raises ApiError."""
    wanted = [(lora.name, lora.scale) for lora in fields.loras]
    loras = await run_in_threadpool(settings.loras.find, wanted) if wanted else ()
    conditioning = await run_in_threadpool(read_conditioning_images, fields, model, settings.limits, references)
    most = drawing.most_pixels(model.name)
    jobs = jobs_of(fields, model, settings.limits, most, image, mask, loras, conditioning, settings.wildcards)
    request.state.log = {"pipeline": model.name, "images": len(jobs), "request": jobs[0].request}
    if jobs[0].loras:
        request.state.log["loras"] = {lora.name: lora.scale for lora in jobs[0].loras}
    if settings.log_prompts:
        request.state.log |= {"prompt": jobs[0].prompt, "negative_prompt": jobs[0].negative_prompt}
    return jobs


async def wanted_still(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the coroutine, and cancel it if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client disconnected.")
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _all(drawing: Drawing, jobs: Sequence[Job]) -> dict[int, Drawn]:
    return {message.index: message async for message in drawing.draw(jobs) if isinstance(message, Drawn)}


def _said(job: Job, image: Drawn) -> dict[str, Any]:
    warnings = {"warnings": list(image.warnings)} if image.warnings else {}
    return {"seed": job.seed, "flagged": image.flagged, **warnings}


async def _events(
    drawing: Drawing, jobs: Sequence[Job], kind: str, progress: bool | None, shared: dict[str, str]
) -> AsyncIterator[bytes]:
    """Yield OpenAI's events. In addition, each has the index of its image, and `progress` events report steps."""

    def event(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

    try:
        async for message in drawing.draw(jobs):
            common = {"created_at": int(time.time()), **shared, "image_index": message.index}
            if isinstance(message, Preview | Drawn):
                common["b64_json"] = b64encode(message.file).decode()
            if isinstance(message, Preview):
                yield event(f"{kind}.partial_image", partial_image_index=message.number, **common)
            elif isinstance(message, Stepped) and progress:
                yield event(f"{kind}.progress", done=message.done, total=message.total, **common)
            elif isinstance(message, Drawn):
                said = _said(jobs[message.index], message)
                yield event(f"{kind}.completed", usage=NO_USAGE, **said, **common)
    except ApiError as error:
        yield event("error", **error.body())
