"""The fields of A1111's webui API that clients send, as pydantic checks them. Those that it does not name have no effect there
either, or are features that sdflow does not have: they are taken, since its clients always send all of them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from sdflow.runtime.drawing.kept import MOST_BLUR
from sdflow.serve.http.openai_fields import Words

ONE_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGO4pqEDAAMCASvdZ1ieAAAAAElFTkSuQmCC"
"""A PNG file, for examples."""


class Options(BaseModel):
    """Settings: the pipeline that requests take which name none."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"sd_model_checkpoint": "shapes_cpu"}]})

    sd_model_checkpoint: Words | None = None


class Text(BaseModel):
    """A request to draw from text."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={"examples": [{"prompt": "a large red circle <lora:stripes:0.8>", "steps": 20, "seed": 7}]},
    )

    prompt: Words = ""
    negative_prompt: Words = ""
    seed: int = Field(-1, ge=-1, lt=2**63)
    steps: int = Field(20, ge=1)
    cfg_scale: float = Field(7.0, ge=0, le=100, allow_inf_nan=False)
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    batch_size: int = Field(1, ge=1)
    n_iter: int = Field(1, ge=1)
    sampler_name: Words | None = None
    sampler_index: Words | None = None
    eta: float | None = Field(None, ge=0, le=1)
    override_settings: Options = Field(default_factory=Options)


class FromImage(Text):
    """A request to draw from an image, in base64; with a mask, into its white part."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [{"prompt": "a green square", "init_images": [ONE_PIXEL], "denoising_strength": 0.6}]
        },
    )

    init_images: list[str] = Field(min_length=1, max_length=1)
    mask: str | None = None
    mask_blur: float = Field(4, ge=0, le=MOST_BLUR)
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    denoising_strength: float = Field(0.75, gt=0, le=1)
