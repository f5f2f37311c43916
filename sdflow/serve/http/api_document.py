"""What `/openapi.json` says and `/docs` shows: an example of every request and every answer, and the errors as they come.

FastAPI knows the fields of requests. It knows neither the answers, which are made here by hand, nor that errors have
OpenAI's form: it would describe others, with a status that is never sent.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sdflow import __version__
from sdflow.families import DEFAULT, FAMILIES
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.webui_lists import EMPTY, REFRESHED, REFUSED
from sdflow.serve.limits import Limits

DENOISER = FAMILIES[DEFAULT].denoiser
IMAGE = "iVBORw0KGgo…"
LORA = {
    "id": "stripes",
    "object": "lora",
    "sent": False,
    "bytes": 412312,
    "sha256": "c71cf474e362c98c…",
    "submodels": [DENOISER],
    "words": ["stripes"],
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
    ("post", "/v1/models"): MODEL,
    ("delete", "/v1/models/{name}"): {"id": "shapes_cpu", "object": "model", "deleted": True},
    ("post", "/v1/images/generations"): DRAWN,
    ("post", "/v1/images/edits"): DRAWN,
    ("post", "/v1/images/variations"): DRAWN,
    ("get", "/v1/loras"): {"object": "list", "data": [LORA]},
    ("post", "/v1/loras"): {**LORA, "sent": True},
    ("delete", "/v1/loras/{name}"): {"id": "stripes", "object": "lora", "deleted": True},
    ("post", "/sdapi/v1/txt2img"): OF_WEBUI,
    ("post", "/sdapi/v1/img2img"): OF_WEBUI,
    ("get", "/sdapi/v1/progress"): {
        "progress": 0.35,
        "eta_relative": 1.3,
        "state": {
            "skipped": False,
            "interrupted": False,
            "job": "txt2img",
            "job_count": 1,
            "job_no": 0,
            "sampling_step": 7,
            "sampling_steps": 20,
        },
        "current_image": IMAGE,
        "textinfo": None,
    },
    ("post", "/sdapi/v1/interrupt"): {},
    ("post", "/sdapi/v1/skip"): {},
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
    ("get", "/sdapi/v1/loras"): [
        {"name": "stripes", "alias": "stripes", "path": "stripes.safetensors", "metadata": {}}
    ],
    ("get", "/sdapi/v1/schedulers"): [
        {"name": "sgm_uniform", "label": "SGM Uniform", "aliases": None, "default_rho": -1.0, "need_inner_model": False}
    ],
    ("get", "/sdapi/v1/upscalers"): [
        {"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1.0}
    ],
    ("get", "/sdapi/v1/embeddings"): {
        "loaded": {
            "my-style": {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": 100, "vectors": 2}
        },
        "skipped": {},
    },
    ("get", "/sdapi/v1/scripts"): {"txt2img": ["controlnet"], "img2img": ["controlnet"]},
    ("get", "/sdapi/v1/script-info"): [{"name": "controlnet", "is_alwayson": True, "is_img2img": False, "args": []}],
    ("get", "/sdapi/v1/memory"): {
        "ram": {"free": 8589934592, "used": 4294967296, "total": 17179869184},
        "cuda": {"error": "only the process that generates knows: see /metrics"},
    },
    ("get", "/sdapi/v1/cmd-flags"): {"api": True, **asdict(Limits())},
    **{("get", f"/sdapi/v1/{path}"): [] for path in EMPTY},
    **{("post", f"/sdapi/v1/{path}"): None for path in REFRESHED},
    ("post", "/sdapi/v1/png-info"): {
        "info": "a cat\nNegative prompt: \nSteps: 20, Seed: 7",
        "items": {"parameters": "a cat\nNegative prompt: \nSteps: 20, Seed: 7"},
        "parameters": {"Prompt": "a cat", "Negative prompt": "", "Steps": "20", "Seed": "7"},
    },
    ("get", "/controlnet/version"): {"version": 3},
    ("get", "/controlnet/model_list"): {"model_list": ["canny"]},
    ("get", "/controlnet/module_list"): {
        "module_list": ["none"],
        "module_detail": {"none": {"model_free": False, "sliders": []}},
    },
    ("get", "/controlnet/settings"): {"control_net_unit_count": 1},
    ("get", "/sdapi/v1/samplers"): [{"name": "Euler a", "aliases": ["euler_a"], "options": {}}],
    ("get", "/sdapi/v1/options"): {
        "sd_model_checkpoint": "shapes_cpu",
        "CLIP_stop_at_last_layers": 1,
        "sd_vae": "Automatic",
    },
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
STREAMED = ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations")
DRAWING = (*STREAMED, "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
UNSUPPORTED = {("post", f"/sdapi/v1/{path}") for path in REFUSED} | {("post", "/controlnet/detect")}

REFUSALS = {
    400: ("A field is wrong.", ApiError(400, "steps is 1000, and may be at most 150 here.", param="steps")),
    401: (
        "The key is missing or wrong.",
        ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY.", code="invalid_api_key"),
    ),
    403: (
        "The Host or the Origin of the request is not allowed, or the key may not administer.",
        ApiError(403, "this server does not accept the Host 'example.org'.", code="host"),
    ),
    404: (
        "There is no such pipeline or LoRA.",
        ApiError(404, "no pipeline is named 'dall-e-3' here, only shapes_cpu.", param="model", code="model_not_found"),
    ),
    408: ("The body took too long to arrive.", ApiError(408, "the request took too long to arrive.", code="too_slow")),
    409: (
        "There is a LoRA of this name, or the pipeline is being loaded.",
        ApiError(409, "a LoRA is named stripes already.", param="name", code="lora_exists"),
    ),
    413: ("The body is too large.", ApiError(413, "the request has more than 33554432 bytes.", code="body_too_large")),
    429: (
        "The queue is full: `Retry-After` says when to try again.",
        ApiError(429, "64 images are drawn or wait, and 64 may. Try again in 4 s.", code="queue_full"),
    ),
    500: (
        "The server failed; its log says why.",
        ApiError(500, "The server failed at this request; its log says why."),
    ),
    503: (
        "The pipelines are being loaded, the process that draws has ended and is started again, or the server is to end.",
        ApiError(503, "The pipelines are being loaded.", code="not_ready"),
    ),
    504: (
        "It took longer than the server's deadline.",
        ApiError(504, "It was not drawn within 600 s.", code="deadline"),
    ),
    507: (
        "There is no room for another LoRA.",
        ApiError(507, "32 LoRAs are uploaded, and the limit is 32.", param="file", code="no_room"),
    ),
}
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
    if (method, path) not in UNSUPPORTED:
        content = {kind: {"example": ANSWERS[method, path]}}
        if path in STREAMED:
            content["text/event-stream"] = {"example": STREAM}
        found[good] = {"description": "As in the example.", "content": content}
    for status in _refusals(method, path):
        about, error = REFUSALS[status]
        found[str(status)] = {
            "description": about,
            "content": {"application/json": {"example": error.body(path)}},
        }
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
