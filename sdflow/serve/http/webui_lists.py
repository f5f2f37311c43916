"""What clients of A1111's webui ask for besides images: lists, settings, the text of a PNG file. What does not exist here is an
empty list; what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from sdflow.errors import CheckpointError
from sdflow.families.image_text import PARAMETERS
from sdflow.families.image_text_reading import infotext_values
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_api import Served
from sdflow.serve.http.uploads import decoded, opened_image
from sdflow.serve.http.webui_fields import ONE_PIXEL
from sdflow.serve.http.webui_samplers import samplers_of, schedule_types
from sdflow.sources.embedding import embeddings_in, read_embedding
from sdflow.sources.safetensors_file import read_metadata

EMPTY = ("hypernetworks", "face-restorers", "realesrgan-models", "prompt-styles", "latent-upscale-modes", "sd-vae")
REFRESHED = ("refresh-checkpoints", "refresh-loras", "refresh-vae", "refresh-embeddings")
"""Files are looked for at every request, and pipelines are those that are served: there is nothing to refresh."""

REFUSED = {
    "extra-single-image": "enlarging and restoring faces",
    "extra-batch-images": "enlarging and restoring faces",
    "interrogate": "describing an image",
    "unload-checkpoint": "unloading a pipeline",
    "reload-checkpoint": "reloading a pipeline",
    "create/embedding": "training",
    "create/hypernetwork": "training",
    "train/embedding": "training",
    "train/hypernetwork": "training",
}


class PngInfo(BaseModel):
    """An image in base64."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"image": ONE_PIXEL}]})

    image: str


def webui_lists(served: Served) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/sdapi/v1", tags=["A1111's webui"])

    def listed(path: str, found: Any, summary: str) -> None:
        async def answer() -> Any:
            return await run_in_threadpool(found) if callable(found) else found

        routes.get(f"/{path}", summary=summary)(answer)

    def models() -> list[dict[str, Any]]:
        unknown = {"hash": None, "sha256": None, "config": None}
        return [{"title": name, "model_name": name, "filename": name, **unknown} for name in served.models]

    def loras() -> list[dict[str, Any]]:
        def metadata(path: Path) -> dict[str, str]:
            with suppress(CheckpointError):
                return read_metadata(path)
            return {}

        return [
            {"name": name, "alias": name, "path": path.name, "metadata": metadata(path)}
            for name, path in served.loras.files().items()
        ]

    def scripts() -> dict[str, list[str]]:
        own = ["controlnet"] if any(model.nets for model in served.models.values()) else []
        return {"txt2img": own, "img2img": own}

    def script_info() -> list[dict[str, Any]]:
        return [
            {"name": name, "is_alwayson": True, "is_img2img": kind == "img2img", "args": []}
            for kind, names in scripts().items()
            for name in names
        ]

    def embeddings() -> dict[str, Any]:
        files = {} if served.embeddings is None else embeddings_in(served.embeddings)
        found: dict[str, dict[str, Any]] = {"loaded": {}, "skipped": {}}
        for word, path in files.items():
            entry: dict[str, Any] = {
                "step": None,
                "sd_checkpoint": None,
                "sd_checkpoint_name": None,
                "shape": 0,
                "vectors": 0,
            }
            try:
                vectors = list(read_embedding(path, word).tensors.values())
            except CheckpointError:
                found["skipped"][word] = entry
            else:
                found["loaded"][word] = {**entry, "shape": vectors[0].shape[-1], "vectors": len(vectors[0])}
        return found

    def memory() -> dict[str, Any]:
        process, whole = psutil.Process(), psutil.virtual_memory()
        used = sum(each.memory_info().rss for each in (process, *process.children()))
        ram = {"free": whole.available, "used": used, "total": whole.total}
        return {"ram": ram, "cuda": {"error": "only the process that generates knows: see /metrics"}}

    listed("sd-models", models, "The pipelines")
    listed("loras", loras, "The LoRAs")
    listed("samplers", lambda: samplers_of(served.models), "The samplers")
    listed("schedulers", schedule_types(), "The schedule types")
    nothing = {"model_name": None, "model_path": None, "model_url": None, "scale": 1.0}
    listed("upscalers", [{"name": "None", **nothing}], "None")
    listed("embeddings", embeddings, "The words of textual inversion files")
    listed("scripts", scripts, "ControlNet, if a pipeline has one")
    listed("script-info", script_info, "The same, in detail")
    listed("memory", memory, "Bytes of main memory")
    listed("cmd-flags", {"api": True, **asdict(served.limits)}, "The limits of the server")
    for path in EMPTY:
        listed(path, [], "Always empty")

    for path in REFRESHED:

        @routes.post(f"/{path}", summary="Has no effect: lists are always current")
        async def refresh() -> None:
            return None

    for path, words in REFUSED.items():
        routes.post(f"/{path}", summary="Not supported")(_refuse(words))

    @routes.post("/png-info", summary="The settings in a PNG file")
    async def png_info(asked: PngInfo) -> dict[str, Any]:
        return await run_in_threadpool(_png_info, asked.image)

    return routes


def _refuse(words: str) -> Any:
    async def refuse() -> None:
        raise ApiError(400, f"{words} is not supported by this server.", code="unsupported")

    return refuse


def _png_info(text: str) -> dict[str, Any]:
    """Raises ApiError for what is no image."""
    with opened_image(decoded(text, "image"), "image") as opened:
        items: Mapping[str, str] = {name: said for name, said in opened.info.items() if isinstance(said, str)}
    said = items.get(PARAMETERS, "")
    values = infotext_values(said) if said else {}
    sides = zip(("Size-1", "Size-2"), values["Size"].split("x"), strict=False) if "Size" in values else ()
    return {"info": said, "items": items, "parameters": {**values, **dict(sides)}}
