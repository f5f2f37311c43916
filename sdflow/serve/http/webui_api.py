"""The generation endpoints of A1111's webui that its common clients use: `/sdapi/v1/txt2img`, `img2img`, `progress`,
`interrupt`, `skip` and `options`. Prompts have the webui's syntax, including `<lora:name:0.8>`."""

from __future__ import annotations

import io
import json
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from sdflow import __version__
from sdflow.runtime.files.image_text import PARAMETERS
from sdflow.runtime.files.image_text_reading import LORA, infotext_values
from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.http.drawing import Drawing
from sdflow.serve.http.openai_api import of_validation, prepared, wanted_still
from sdflow.serve.http.openai_fields import Edit
from sdflow.serve.http.openai_fields import Lora as LoraField
from sdflow.serve.http.settings import Settings
from sdflow.serve.http.uploads import as_mask, as_rgb, read_base64
from sdflow.serve.http.webui_fields import FromImage, Options, Text
from sdflow.serve.http.webui_inpaint import Part, filled, inverted
from sdflow.serve.jobs import Drawn, Image, Job, Preview, Stepped


def loras_in(prompt: str) -> tuple[str, list[LoraField]]:
    """Return the prompt without `<lora:NAME:SCALE>`, and the LoRAs named in it. Raises ApiError."""
    found = []
    for name, scale in LORA.findall(prompt):
        try:
            found.append(LoraField(name=name, scale=float(scale) if scale else 1.0))
        except ValidationError as error:
            raise invalid("prompt", f"<lora:{name}:{scale}>: {of_validation(error).message}") from error
        except ValueError as error:
            raise invalid("prompt", f"{scale!r} is not a valid scale for the LoRA {name}.") from error
    return LORA.sub("", prompt).strip() if found else prompt, found


@dataclass
class _Open:
    """A request in progress. steps: (finished, total) by image. preview: the latest one."""

    batch: int
    steps: dict[int, tuple[int, int]]
    begun: float = field(default_factory=time.monotonic)
    finished: int = 0
    preview: bytes | None = None
    interrupted: bool = False
    skipped: bool = False

    def share(self) -> float:
        return sum(done / total for done, total in self.steps.values()) / len(self.steps)


@dataclass
class _Own:
    """State of one owner (of a `Caller`). Clients of the webui do not name requests, as it runs one at a time."""

    options: Options = field(default_factory=Options)
    open: dict[str, _Open] = field(default_factory=dict)


def webui_routes(settings: Settings, drawing: Drawing) -> APIRouter:
    routes = APIRouter(prefix="/sdapi/v1", tags=["A1111's webui"])
    owners: dict[str | None, _Own] = {}

    def own(request: Request) -> _Own:
        found = owners.setdefault(request.state.caller.owner, _Own())
        if settings.models.named(found.options.sd_model_checkpoint) is None:  # removed meanwhile
            found.options.sd_model_checkpoint = None
        return found

    def seen(request: Request) -> dict[str, _Open]:
        """Return the requests that the caller may see and stop."""
        visible = [each for owner, each in owners.items() if request.state.caller.may_stop(owner)]
        return {name: found for each in visible for name, found in each.open.items()}

    async def draw(
        request: Request, asked: Text, image: Image | None = None, mask: Image | None = None
    ) -> dict[str, Any]:
        prompt, loras = loras_in(asked.prompt)
        options = _changed(own(request).options, asked.override_settings)
        model = settings.models.find(options.sd_model_checkpoint)
        if not asked.override_settings_restore_afterwards:
            own(request).options = options
        side, part = model.latents.image_size, None
        scheduler = asked.scheduler_of(model.schedulers)
        width, height = asked.width or side, asked.height or side
        if isinstance(asked, FromImage) and image is not None and mask is not None:
            if asked.inpaint_full_res:  # check the size before scaling the part to it
                most = drawing.most_pixels(model.name) or settings.limits.sent_pixels
                settings.limits.require_size(height, width, model.latents.granularity, most)
            if asked.inpainting_fill == 0:
                image = await run_in_threadpool(filled, image, mask)
            if asked.inpaint_full_res:
                padding = asked.inpaint_full_res_padding
                part = await run_in_threadpool(Part.of, image, mask, width, height, padding, asked.mask_blur)
                image, mask = await run_in_threadpool(part.cut, width, height)
        units, skipped = asked.units(), (options.CLIP_stop_at_last_layers or 1) - 1
        start = asked.init_images[0] if isinstance(asked, FromImage) else None
        given = {
            **asked.settings(),
            "prompt": prompt,
            "negative_prompt": asked.negative_prompt or None,
            "n": asked.batch_size * asked.n_iter,
            "size": None if image and not asked.width and not asked.height else f"{width}x{height}",
            "seed": None if asked.seed < 0 else asked.seed,
            "scheduler": scheduler,
            "clip_skip": skipped or None,
            "loras": loras,
            "control": [unit.field(start) for unit in units],
            **({} if mask is not None else {"mask_blur": None}),
        }
        jobs = await prepared(request, settings, drawing, Edit.model_validate(given), model, image, mask)
        size = jobs[0].arguments.get("width", side), jobs[0].arguments.get("height", side)
        for unit, control in zip(units, jobs[0].conditioning.controls, strict=True):
            unit.require_shape(control.image.size, size)
        found = await wanted_still(request, _watched(drawing, jobs, asked.batch_size, own(request)))
        drawn = [jobs[index] for index in sorted(found)]
        files = [found[job.index].file for job in drawn]
        if part is not None:
            files = [await run_in_threadpool(part.put_back, file) for file in files]
        info = _info(asked, drawn or jobs[:1], files, (width, height), model.name)
        if said := list(dict.fromkeys(each for image in found.values() for each in image.warnings)):
            info["comments"] = said
        left_out = set() if isinstance(asked, FromImage) and asked.include_init_images else {"init_images", "mask"}
        images = [b64encode(file).decode() for file in files] if asked.send_images else []
        return {"images": images, "parameters": asked.model_dump(exclude=left_out), "info": json.dumps(info)}

    @routes.post("/txt2img", summary="Generate images from text")
    async def txt2img(request: Request, asked: Text) -> dict[str, Any]:
        return await draw(request, asked)

    @routes.post("/img2img", summary="Generate images from an image, or in the white part of a mask")
    async def img2img(request: Request, asked: FromImage) -> dict[str, Any]:
        def read(text: str, param: str) -> Image:
            return as_rgb(read_base64(text, param, settings.limits))

        def read_mask(text: str) -> Image:
            mask = as_mask(read(text, "mask"))
            return inverted(mask) if asked.inpainting_mask_invert else mask

        image = await run_in_threadpool(read, asked.init_images[0], "init_images")
        mask = await run_in_threadpool(read_mask, asked.mask) if asked.mask else None
        return await draw(request, asked, image, mask)

    @routes.get("/progress", summary="Progress of this API's requests")
    async def progress(request: Request, skip_current_image: bool = False) -> dict[str, Any]:
        opened = seen(request)
        share = sum(each.share() for each in opened.values()) / max(1, len(opened))
        steps = [step for each in opened.values() for step in each.steps.values()]
        done, total = sum(step[0] for step in steps), sum(step[1] for step in steps)
        seconds = time.monotonic() - min((each.begun for each in opened.values()), default=0.0)
        shown = None
        if opened and not skip_current_image:
            first = next(iter(opened))
            shown = opened[first].preview
            drawing.show(first)  # for the next poll
        return {
            "progress": share,
            "eta_relative": seconds / share - seconds if share else 0.0,
            "state": {
                "skipped": any(each.skipped for each in opened.values()),
                "interrupted": any(each.interrupted for each in opened.values()),
                "job": "txt2img" if opened else "",
                "job_count": sum(-(-len(each.steps) // each.batch) for each in opened.values()),
                "job_no": sum(each.finished // each.batch for each in opened.values()),
                "sampling_step": done,
                "sampling_steps": total,
            },
            "current_image": None if shown is None else b64encode(shown).decode(),
            "textinfo": "Waiting..." if opened and not done else None,
        }

    @routes.post("/interrupt", summary="Stop this API's requests and return their unfinished images")
    async def interrupt(request: Request) -> dict[str, Any]:
        for name, each in seen(request).items():
            each.interrupted = True
            drawing.interrupt(name)
        return {}

    @routes.post("/skip", summary="Stop only the images that have started")
    async def skip(request: Request) -> dict[str, Any]:
        for name, each in seen(request).items():
            each.skipped = True
            drawing.show(name, end=True)
        return {}

    @routes.get("/options", summary="Default settings of requests")
    async def options(request: Request) -> dict[str, Any]:
        found = own(request).options
        model, layers = found.sd_model_checkpoint or next(iter(settings.models), None), found.CLIP_stop_at_last_layers
        return {"sd_model_checkpoint": model, "CLIP_stop_at_last_layers": layers or 1, "sd_vae": "Automatic"}

    @routes.post("/options", summary="Change the default settings")
    async def set_options(request: Request, asked: Options) -> dict[str, Any]:
        settings.models.find(asked.sd_model_checkpoint)
        own(request).options = _changed(own(request).options, asked)
        return {}

    return routes


def _changed(options: Options, changes: Options) -> Options:
    return options.model_copy(update=changes.model_dump(exclude_none=True, include=set(Options.model_fields)))


def _info(asked: Text, jobs: Sequence[Job], files: list[bytes], size: tuple[int, int], model: str) -> dict[str, Any]:
    """Return the webui's `info` object. `infotexts` are those in the files."""
    import PIL.Image

    texts = [PIL.Image.open(io.BytesIO(file)).info.get(PARAMETERS, "") for file in files]
    values, seeds = infotext_values(texts[0]) if texts else {}, [job.seed for job in jobs]
    said = {"prompt", "negative_prompt", "steps", "cfg_scale", "batch_size", "denoising_strength"}
    return {
        "denoising_strength": None,
        **asked.model_dump(include=said),
        "all_prompts": [job.prompt for job in jobs],
        "all_negative_prompts": [job.negative_prompt or "" for job in jobs],
        "seed": seeds[0],
        "all_seeds": seeds,
        "width": size[0],
        "height": size[1],
        "sampler_name": values.get("Sampler"),
        "sd_model_name": model,
        "clip_skip": int(values.get("Clip skip", 1)),
        "index_of_first_image": 0,
        "infotexts": texts,
        "version": f"sdflow {__version__}",
    }


async def _watched(drawing: Drawing, jobs: Sequence[Job], batch: int, own: _Own) -> dict[int, Drawn]:
    """Run the jobs and return the images by index: all of them unless the request was interrupted."""
    request, found = jobs[0].request, dict[int, Drawn]()
    seen = _Open(batch, {job.index: (0, job.arguments["num_inference_steps"]) for job in jobs})
    own.open[request] = seen
    messages = drawing.draw(jobs)
    try:
        async for message in messages:
            if isinstance(message, Stepped):
                seen.steps[message.index] = message.done, message.total
            elif isinstance(message, Preview):
                seen.preview = message.file
            elif isinstance(message, Drawn):
                found[message.index] = message
                seen.finished += 1
    except ApiError:
        if not seen.interrupted and not seen.skipped:  # on a cluster, interrupted images end without a result
            raise
    finally:
        await messages.aclose()  # type: ignore[attr-defined]
        del own.open[request]
    return found
