"""What the common clients of A1111's webui call: `/sdapi/v1/txt2img`, `img2img`, `progress`, `interrupt`, and the lists.

Prompts are read as the webui reads them, `<lora:name:0.8>` in them included. Names of files, upscalers, scripts and the like have
no effect.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from sdflow.families.image_text_reading import LORA
from sdflow.families.shared.sampler_names import SAMPLERS
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_api import Served, note, of_validation, wanted_still
from sdflow.serve.http.openai_fields import Edit
from sdflow.serve.http.openai_fields import Lora as LoraField
from sdflow.serve.http.requested import find_model, jobs_of
from sdflow.serve.http.uploads import as_mask, as_rgb, read_base64
from sdflow.serve.http.webui_fields import FromImage, Options, Text
from sdflow.serve.jobs import Drawn, Image, Job, Stepped


def loras_in(prompt: str) -> tuple[str, list[LoraField]]:
    """The prompt without `<lora:NAME:SCALE>`, and what these name. Raises ApiError for a scale that is no number."""
    found = []
    for name, scale in LORA.findall(prompt):
        try:
            found.append(LoraField(name=name, scale=float(scale) if scale else 1.0))
        except ValidationError as error:
            raise ApiError(400, f"<lora:{name}:{scale}>: {of_validation(error).message}", param="prompt") from error
        except ValueError as error:
            raise ApiError(400, f"{scale!r} is no scale of the LoRA {name}.", param="prompt") from error
    return LORA.sub("", prompt).strip() if found else prompt, found


class _Now:
    """What was begun over this API and is not finished: the webui draws one request at a time, so its clients ask of all."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[int, int]] = {}
        self.interrupted: set[str] = set()
        self.model: str | None = None


def webui_routes(served: Served) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/sdapi/v1", tags=["A1111's webui"])
    now = _Now()

    async def draw(request: Request, asked: Text, image: Image | None, mask: Image | None) -> dict[str, Any]:
        prompt, wanted = loras_in(asked.prompt)
        name = asked.override_settings.sd_model_checkpoint or now.model
        model = find_model(served.models, name)
        scheduler = _scheduler(asked.sampler_name or asked.sampler_index, model.schedulers)
        side = model.latents.image_size
        size = f"{asked.width or side}x{asked.height or side}"
        fields = Edit.model_validate(
            {
                **asked.settings(),
                "prompt": prompt,
                "negative_prompt": asked.negative_prompt or None,
                "n": asked.batch_size * asked.n_iter,
                "size": None if image and not asked.width and not asked.height else size,
                "seed": None if asked.seed < 0 else asked.seed,
                "scheduler": scheduler,
                "loras": wanted,
                **({} if mask is not None else {"mask_blur": None}),
            }
        )
        names = [(lora.name, lora.scale) for lora in wanted]
        loras = await run_in_threadpool(served.loras.find, names) if names else ()
        most, wildcards = served.drawing.most_pixels(model.name), served.wildcards
        jobs = jobs_of(fields, model, served.limits, most, image, mask, loras, wildcards=wildcards)
        note(request, served, model, jobs)
        found = await wanted_still(request, _watched(served, jobs, now))
        seeds = [job.seed for job in jobs]
        info = {
            "prompt": asked.prompt,
            "all_prompts": [job.prompt for job in jobs],
            "negative_prompt": asked.negative_prompt,
            "seed": seeds[0],
            "all_seeds": seeds,
            "steps": asked.steps,
            "cfg_scale": asked.cfg_scale,
            "sampler_name": next((name for name, own in SAMPLERS.items() if own == scheduler), scheduler),
            "sd_model_name": model.name,
        }
        if said := list(dict.fromkeys(each for image in found.values() for each in image.warnings)):
            info["comments"] = said
        images = [b64encode(found[index].file).decode() for index in sorted(found)]
        return {"images": images, "parameters": asked.model_dump(), "info": json.dumps(info)}

    @routes.post("/txt2img", summary="Draw from text")
    async def txt2img(request: Request, asked: Text) -> dict[str, Any]:
        return await draw(request, asked, None, None)

    @routes.post("/img2img", summary="Draw from an image, or into the white part of a mask")
    async def img2img(request: Request, asked: FromImage) -> dict[str, Any]:
        def read(text: str, param: str) -> Image:
            return read_base64(text, param, served.limits)

        image = as_rgb(await run_in_threadpool(read, asked.init_images[0], "init_images"))
        mask = None
        if asked.mask is not None:
            mask = as_mask(as_rgb(await run_in_threadpool(read, asked.mask, "mask")))
            if asked.inpainting_mask_invert:
                mask = Image(mask.mode, mask.size, bytes(255 - value for value in mask.pixels))
        return await draw(request, asked, image, mask)

    @routes.get("/progress", summary="How far what was asked over this API is")
    async def progress() -> dict[str, Any]:
        done, total = (sum(each[place] for each in now.steps.values()) for place in (0, 1))
        state = {"sampling_step": done, "sampling_steps": total, "job_count": len(now.steps), "interrupted": False}
        return {"progress": done / total if total else 0.0, "eta_relative": 0.0, "state": state, "current_image": None}

    @routes.post("/interrupt", summary="End what was asked over this API at the next step")
    async def interrupt() -> dict[str, Any]:
        now.interrupted.update(now.steps)
        return {}

    @routes.get("/sd-models", summary="The pipelines")
    async def models() -> list[dict[str, Any]]:
        return [
            {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
            for name in served.models
        ]

    @routes.get("/loras", summary="The LoRAs")
    async def loras() -> list[dict[str, Any]]:
        return [{"name": name, "alias": name, "path": name, "metadata": {}} for name in served.loras.files()]

    @routes.get("/samplers", summary="The samplers")
    async def samplers() -> list[dict[str, Any]]:
        return [{"name": name, "aliases": [scheduler], "options": {}} for name, scheduler in SAMPLERS.items()]

    @routes.get("/options", summary="The pipeline that is taken where a request names none")
    async def options() -> dict[str, Any]:
        return {"sd_model_checkpoint": now.model or next(iter(served.models))}

    @routes.post("/options", summary="Take another")
    async def set_options(asked: Options) -> dict[str, Any]:
        if asked.sd_model_checkpoint is not None:
            now.model = find_model(served.models, asked.sd_model_checkpoint).name
        return {}

    return routes


async def _watched(served: Served, jobs: list[Job], now: _Now) -> dict[int, Drawn]:
    """The images that were drawn: all of them, unless it was interrupted."""
    request, found = jobs[0].request, {}
    steps = dict.fromkeys(range(len(jobs)), (0, jobs[0].arguments.get("num_inference_steps", 1)))
    now.steps[request] = (0, sum(total for _, total in steps.values()))
    messages = served.drawing.draw(jobs)
    try:
        async for message in messages:
            if isinstance(message, Stepped):
                steps[message.index] = message.done, message.total
                now.steps[request] = sum(done for done, _ in steps.values()), sum(total for _, total in steps.values())
            elif isinstance(message, Drawn):
                found[message.index] = message
            if request in now.interrupted:
                break
    finally:
        await messages.aclose()  # type: ignore[attr-defined]
        del now.steps[request]
        now.interrupted.discard(request)
    return found


def _scheduler(sampler: str | None, schedulers: Collection[str]) -> Any:
    """The scheduler of a sampler. "Karras" behind its name has no effect: timesteps are the scheduler's own, and the answer names
    the sampler without it. Raises ApiError."""
    if sampler is None or sampler == "Automatic":
        return None
    own = {name.lower(): scheduler for name, scheduler in SAMPLERS.items()}
    plain = sampler.lower().removesuffix(" karras").removesuffix(" exponential")
    if plain in own:  # for families of flow matching, the sampler of that name
        found = own[plain]
        return f"flow_{found}" if found not in schedulers and f"flow_{found}" in schedulers else found
    if plain in own.values():
        return plain
    raise ApiError(
        400,
        f"no sampler is named {sampler!r} here, only {', '.join(SAMPLERS)}.",
        param="sampler_name",
        code="invalid_value",
    )
