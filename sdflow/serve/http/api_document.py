"""What `/openapi.json` says and `/docs` shows: an example of every request and every answer, and the errors as they come.

FastAPI knows the fields of requests. It knows neither the answers, which are made here by hand, nor that errors have
OpenAI's form: it would describe others, with a status that is never sent.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sdflow import __version__
from sdflow.families import DEFAULT, FAMILIES
from sdflow.serve.api_error import ApiError

DENOISER = FAMILIES[DEFAULT].denoiser
IMAGE = "iVBORw0KGgo…"
LORA = {
    "id": "stripes",
    "object": "lora",
    "sent": False,
    "bytes": 412312,
    "sha256": "c71cf474e362c98c…",
    "submodels": [DENOISER],
}
MODEL = {
    "id": "shapes_cpu",
    "object": "model",
    "created": 1795399494,
    "owned_by": "sdflow",
    "sdflow": {
        "family": "Stable Diffusion 1.x and 2.x",
        "target": "cpu",
        "verified": "quick",
        "verdict": "verified, quick",
        "task": "text",
        "from_images": True,
        "checker": False,
        "control": [],
        "image_prompts": 0,
        "references": 0,
        "size": "128x128",
        "multiple": 32,
        "max_pixels": 262144,
        "defaults": {"text": {"steps": 50, "guidance_scale": 7.5, "strength": 1.0, "eta": 0.0}},
        "schedulers": ["ddim", "euler"],
        "loras": [],
        "artifacts": {DENOISER: "sha256:5d41402a…"},
        "quantized": {},
        "dequantized_from": {},
        "exact": True,
        "left_aside": {},
    },
}
DRAWN = {
    "created": 1795399494,
    "data": [{"b64_json": IMAGE, "seed": 7, "flagged": None}],
    "output_format": "png",
    "size": "128x128",
    "quality": "auto",
    "background": "opaque",
    "usage": {
        "input_tokens": 0,
        "output_tokens": 0,
        "total_tokens": 0,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    },
}
OF_WEBUI = {
    "images": [IMAGE],
    "parameters": {"prompt": "a large red circle <lora:stripes:0.8>", "steps": 20},
    "info": '{"seed": 7, "all_seeds": [7], "steps": 20, "sd_model_name": "shapes_cpu"}',
}

ANSWERS: dict[tuple[str, str], Any] = {
    ("get", "/v1/models"): {"object": "list", "data": [MODEL]},
    ("get", "/v1/models/{name}"): MODEL,
    ("post", "/v1/images/generations"): DRAWN,
    ("post", "/v1/images/edits"): DRAWN,
    ("get", "/v1/loras"): {"object": "list", "data": [LORA]},
    ("post", "/v1/loras"): {**LORA, "sent": True},
    ("delete", "/v1/loras/{name}"): {"id": "stripes", "object": "lora", "deleted": True},
    ("post", "/sdapi/v1/txt2img"): OF_WEBUI,
    ("post", "/sdapi/v1/img2img"): OF_WEBUI,
    ("get", "/sdapi/v1/progress"): {
        "progress": 0.35,
        "eta_relative": 0.0,
        "state": {"sampling_step": 7, "sampling_steps": 20, "job_count": 1, "interrupted": False},
        "current_image": None,
    },
    ("post", "/sdapi/v1/interrupt"): {},
    ("get", "/sdapi/v1/sd-models"): [
        {
            "title": "shapes_cpu",
            "model_name": "shapes_cpu",
            "hash": None,
            "sha256": None,
            "filename": "shapes_cpu",
            "config": None,
        }
    ],
    ("get", "/sdapi/v1/loras"): [{"name": "stripes", "alias": "stripes", "path": "stripes", "metadata": {}}],
    ("get", "/sdapi/v1/samplers"): [{"name": "Euler a", "aliases": ["euler_a"], "options": {}}],
    ("get", "/sdapi/v1/options"): {"sd_model_checkpoint": "shapes_cpu"},
    ("post", "/sdapi/v1/options"): {},
    ("get", "/healthz"): {"status": "ok"},
    ("get", "/readyz"): {
        "status": "ready",
        "pipelines": {"shapes_cpu": {"batch_seconds": {"1": 0.02, "2": 0.031}, "alone": None, "lanes": 2}},
    },
    ("get", "/metrics"): "sdflow_images_total 12.0\nsdflow_waiting_images 0.0\n",
}
"""The answer to each request, as an example."""

STREAM = (
    'event: image_generation.partial_image\ndata: {"type": "image_generation.partial_image", "b64_json": "…", '
    '"partial_image_index": 0}\n\nevent: image_generation.completed\ndata: {"type": "image_generation.completed", '
    '"b64_json": "…", "seed": 7}\n\n'
)
DRAWING = ("/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
STREAMED = DRAWING[:2]

REFUSALS = {
    400: ApiError(400, "steps is 1000, and may be at most 150 here.", param="steps"),
    401: ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY.", code="invalid_api_key"),
    404: ApiError(404, "no pipeline is named 'dall-e-3' here, only shapes_cpu.", param="model", code="model_not_found"),
    429: ApiError(429, "64 images are drawn or wait, and 64 may. Try again in 4 s.", code="queue_full"),
    503: ApiError(503, "The pipelines are being loaded.", code="not_ready"),
    504: ApiError(504, "It was not drawn within 600 s.", code="deadline"),
}
ABOUT = {
    400: "A field is wrong.",
    401: "The key is missing or wrong.",
    404: "There is no such pipeline or LoRA.",
    429: "The queue is full: `Retry-After` says when to try again.",
    503: "The pipelines are being loaded, or the process that draws has ended and is started again.",
    504: "It took longer than the server's deadline.",
}


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
    content = {kind: {"example": ANSWERS[method, path]}}
    if path in STREAMED:
        content["text/event-stream"] = {"example": STREAM}
    found = {good: {"description": "As in the example.", "content": content}}
    for status in _refusals(method, path):
        example = {"example": REFUSALS[status].body()}
        found[str(status)] = {"description": ABOUT[status], "content": {"application/json": example}}
    return found


def _refusals(method: str, path: str) -> tuple[int, ...]:
    if path in DRAWING:
        return 400, 401, 404, 429, 503, 504
    if path == "/healthz":
        return ()
    if path == "/readyz":
        return (503,)
    named = (404,) if "{name}" in path else ()
    return (*((400,) if method == "post" else ()), 401, *named)
