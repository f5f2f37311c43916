"""The endpoints of the webui's ControlNet extension, and its units in a request: an image that is a map already, for a ControlNet
of the pipeline. Preprocessors, which make a map of an image, are not implemented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_fields import ControlField
from sdflow.serve.http.served_model import ServedModel
from sdflow.serve.http.webui_fields import Unit
from sdflow.serve.jobs import Job

NO_MODULE = (None, "", "none", "None")
STRETCHED = (0, "Just Resize", "Scale to Fit (Just Resize)")
BALANCED = (0, "Balanced")


def control_fields(units: Sequence[Unit], start: str | None) -> list[ControlField]:
    """As the server's requests have them. start: the image of an img2img request, for units without one. Raises ApiError."""
    for unit in units:
        if unit.module not in NO_MODULE:
            raise _refused(
                f"the preprocessor {unit.module!r} is not supported: send its result, with the module 'none'"
            )
        if unit.control_mode not in BALANCED:
            raise _refused(f"the control mode {unit.control_mode!r} is not supported, only 'Balanced'")
        if not (unit.image or start):
            raise _refused(f"the unit of {unit.model!r} has no image")
    return [
        ControlField(
            name=unit.model.partition(" [")[0],
            image=unit.image or start or "",
            scale=unit.weight,
            start=unit.guidance_start,
            end=unit.guidance_end,
        )
        for unit in units
    ]


def require_shapes(units: Sequence[Unit], job: Job, side: int) -> None:
    """Raises ApiError for maps that are to be cropped or padded: they are stretched to the size that is drawn. side: of an image
    where the request says none."""
    width, height = job.arguments.get("width", side), job.arguments.get("height", side)
    for unit, control in zip(units, job.conditioning.controls, strict=True):
        across, down = control.image.size
        if unit.resize_mode not in STRETCHED and across * height != down * width:
            words = (
                f"the image of {unit.model!r} has {across}x{down} pixels, which is not the shape of {width}x{height}"
            )
            raise _refused(f"{words}: resize it, or send resize_mode 'Just Resize'")


def _refused(words: str) -> ApiError:
    return ApiError(400, f"ControlNet: {words}.", param="alwayson_scripts", code="invalid_value")


def controlnet_routes(models: Mapping[str, ServedModel]) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/controlnet", tags=["A1111's webui"])

    @routes.get("/version", summary="The version of the extension's API")
    async def version() -> dict[str, int]:
        return {"version": 3}

    @routes.get("/model_list", summary="The ControlNets of all pipelines")
    async def model_list() -> dict[str, list[str]]:
        return {"model_list": sorted({net for model in models.values() for net in model.nets})}

    @routes.get("/module_list", summary="The preprocessors: none")
    async def module_list() -> dict[str, Any]:
        return {"module_list": ["none"], "module_detail": {"none": {"model_free": False, "sliders": []}}}

    @routes.get("/settings", summary="How many units a request may have")
    async def settings() -> dict[str, int]:
        return {"control_net_unit_count": max((len(model.nets) for model in models.values()), default=0)}

    @routes.post("/detect", summary="Not supported")
    async def detect() -> None:
        raise ApiError(
            400, "preprocessors are not supported: send a ControlNet's input image itself.", code="unsupported"
        )

    return routes
