"""Other endpoints that clients of A1111's webui call: lists, settings, PNG metadata. Missing features are empty lists;
unsupported actions are rejected."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from sdflow.errors import CheckpointError
from sdflow.families.shared.sampler_names import AUTOMATIC, available
from sdflow.families.shared.schedulers import SAMPLERS, SPACINGS
from sdflow.runtime.files.image_text import PARAMETERS
from sdflow.runtime.files.image_text_reading import infotext_values
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.settings import Settings
from sdflow.serve.http.uploads import decoded, opened_image
from sdflow.sources.embedding import embeddings_in, read_embedding
from sdflow.sources.safetensors_file import read_metadata

SDAPI, CONTROLNET = "/sdapi/v1", "/controlnet"

EMPTY = ("hypernetworks", "face-restorers", "realesrgan-models", "prompt-styles", "latent-upscale-modes", "sd-vae")
REFRESHED = ("refresh-checkpoints", "refresh-loras", "refresh-vae", "refresh-embeddings")
"""Nothing needs refreshing: files are looked up at every request, and the pipelines are those served."""

REFUSED = {
    f"{SDAPI}/extra-single-image": "upscaling and face restoration are not supported by this server",
    f"{SDAPI}/extra-batch-images": "upscaling and face restoration are not supported by this server",
    f"{SDAPI}/interrogate": "captioning is not supported by this server",
    f"{SDAPI}/unload-checkpoint": "unloading a pipeline is not supported by this server",
    f"{SDAPI}/reload-checkpoint": "reloading a pipeline is not supported by this server",
    f"{SDAPI}/create/embedding": "training is not supported by this server",
    f"{SDAPI}/create/hypernetwork": "training is not supported by this server",
    f"{SDAPI}/train/embedding": "training is not supported by this server",
    f"{SDAPI}/train/hypernetwork": "training is not supported by this server",
    f"{CONTROLNET}/detect": "preprocessors are not supported; send a ControlNet's input image",
    f"{CONTROLNET}/render_openpose_json": "drawing poses is not supported by this server",
}


class PngInfo(BaseModel):
    """A base64-encoded image."""

    image: str


def webui_lists(settings: Settings) -> APIRouter:
    routes, served = APIRouter(tags=["A1111's webui"]), settings.models

    def listed(path: str, found: Any, summary: str) -> None:
        async def answer() -> Any:
            return await run_in_threadpool(found) if callable(found) else found

        routes.get(path, summary=summary)(answer)

    def models() -> list[dict[str, Any]]:
        unknown = {"hash": None, "sha256": None, "config": None}
        return [{"title": name, "model_name": name, "filename": name, **unknown} for name in served]

    def loras() -> list[dict[str, Any]]:
        def metadata(path: Path) -> dict[str, str]:
            with suppress(CheckpointError):
                return read_metadata(path)
            return {}

        return [
            {"name": name, "alias": name, "path": path.name, "metadata": metadata(path)}
            for name, path in settings.loras.files().items()
        ]

    def samplers() -> list[dict[str, Any]]:
        """Return the samplers of all pipelines. A diffusion and a flow-matching sampler may share a name."""
        known = {name: row for model in served.values() for name, row in model.schedulers.items() if name in SAMPLERS}
        found: dict[str, list[str]] = {}
        for name in available(known):
            found.setdefault(SAMPLERS[name].webui or name, []).append(name)
        automatic = {label: SAMPLERS[names[0]].automatic for label, names in found.items()}
        return [
            {"name": label, "aliases": names, "options": {"scheduler": automatic[label]} if automatic[label] else {}}
            for label, names in found.items()
        ]

    def nets() -> list[str]:
        return sorted({net for model in served.values() for net in model.nets})

    def scripts() -> dict[str, list[str]]:
        return dict.fromkeys(("txt2img", "img2img"), ["controlnet"] if nets() else [])

    def script_info() -> list[dict[str, Any]]:
        net = {"name": "controlnet", "is_alwayson": True, "args": []}
        return [{**net, "is_img2img": each} for each in (False, True)] if nets() else []

    def embeddings() -> dict[str, Any]:
        folder = settings.worker.embeddings
        found: dict[str, dict[str, Any]] = {"loaded": {}, "skipped": {}}
        for word, path in ({} if folder is None else embeddings_in(folder)).items():
            entry = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None}
            try:
                vectors = list(read_embedding(path, word).tensors.values())
            except CheckpointError:
                found["skipped"][word] = {**entry, "shape": 0, "vectors": 0}
            else:
                found["loaded"][word] = {**entry, "shape": vectors[0].shape[-1], "vectors": len(vectors[0])}
        return found

    def memory() -> dict[str, Any]:
        process, whole = psutil.Process(), psutil.virtual_memory()
        used = sum(each.memory_info().rss for each in (process, *process.children()))
        ram = {"free": whole.available, "used": used, "total": whole.total}
        return {"ram": ram, "cuda": {"error": "not available"}}

    def units() -> dict[str, int]:
        return {"control_net_unit_count": max((len(model.nets) for model in served.values()), default=0)}

    def control_types() -> dict[str, Any]:
        known = ["None", *nets()]
        all_of_them = {
            "module_list": ["none"],
            "model_list": known,
            "default_option": "none",
            "default_model": known[-1],
        }
        return {"control_types": {"All": all_of_them}}

    listed(f"{SDAPI}/sd-models", models, "The pipelines")
    listed(f"{SDAPI}/loras", loras, "The LoRAs")
    listed(f"{SDAPI}/samplers", samplers, "The samplers")
    labels = {"automatic": AUTOMATIC, "uniform": "Uniform", **{name: each.webui for name, each in SPACINGS.items()}}
    rest = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    schedules = [{"name": name, "label": label, **rest} for name, label in labels.items()]
    listed(f"{SDAPI}/schedulers", schedules, "The schedule types")
    upscaler = {"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1.0}
    listed(f"{SDAPI}/upscalers", [upscaler], "None")
    listed(f"{SDAPI}/embeddings", embeddings, "Textual inversion embeddings")
    listed(f"{SDAPI}/scripts", scripts, "ControlNet, if a pipeline has one")
    listed(f"{SDAPI}/script-info", script_info, "ControlNet's script, in detail")
    listed(f"{SDAPI}/memory", memory, "Bytes of main memory")
    listed(f"{SDAPI}/cmd-flags", {"api": True, **asdict(settings.limits)}, "The limits of the server")
    for path in EMPTY:
        listed(f"{SDAPI}/{path}", [], "Always empty")
    listed(f"{CONTROLNET}/version", {"version": 3}, "The version of the extension's API")
    listed(f"{CONTROLNET}/model_list", lambda: {"model_list": nets()}, "The ControlNets of all pipelines")
    modules = {"module_list": ["none"], "module_detail": {"none": {"model_free": False, "sliders": []}}}
    listed(f"{CONTROLNET}/module_list", modules, "The preprocessors: none")
    listed(f"{CONTROLNET}/control_types", control_types, "Preprocessors and ControlNets, all of one type")
    listed(f"{CONTROLNET}/settings", units, "Maximum number of units of a request")

    for path in REFRESHED:

        @routes.post(f"{SDAPI}/{path}", summary="Has no effect: lists are always current")
        async def refresh() -> None:
            return None

    for path, words in REFUSED.items():
        routes.post(path, summary="Not supported")(_refuse(words))

    @routes.post(f"{SDAPI}/png-info", summary="The settings in a PNG file")
    async def png_info(asked: PngInfo) -> dict[str, Any]:
        return await run_in_threadpool(_png_info, asked.image)

    return routes


def _refuse(words: str) -> Any:
    async def refuse() -> None:
        raise ApiError(400, f"{words}.", code="unsupported")

    return refuse


def _png_info(text: str) -> dict[str, Any]:
    """Raises ApiError if the file is not an image."""
    with opened_image(decoded(text, "image"), "image") as opened:
        items = {name: said for name, said in opened.info.items() if isinstance(said, str)}
    said = items.get(PARAMETERS, "")
    values = infotext_values(said) if said else {}
    sides = zip(("Size-1", "Size-2"), values["Size"].split("x"), strict=False) if "Size" in values else ()
    return {"info": said, "items": items, "parameters": {**values, **dict(sides)}}
