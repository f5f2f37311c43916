"""The fields of A1111's webui API that clients send, as pydantic checks them. Those that it does not name have no effect there
either, or are features that sdflow does not have: they are taken, since its clients always send all of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sdflow.config.parameter_fields import Text as Words
from sdflow.config.parameter_fields import field_of
from sdflow.families.settings import COMMON

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
    steps: int = field_of(COMMON["steps"], 20)
    cfg_scale: float = field_of(COMMON["guidance_scale"], 7.0)
    width: int | None = Field(None, ge=1)
    height: int | None = Field(None, ge=1)
    batch_size: int = Field(1, ge=1)
    n_iter: int = Field(1, ge=1)
    sampler_name: Words | None = None
    sampler_index: Words | None = None
    scheduler: Words | None = None
    eta: float | None = field_of(COMMON["eta"], None)
    override_settings: Options = Field(default_factory=Options)

    def settings(self) -> dict[str, Any]:
        """The settings of a drawing by name, without size, seed and scheduler, which are spelled otherwise here."""
        named = {name: each.webui for name, each in COMMON.items() if each.webui in type(self).model_fields}
        return {name: getattr(self, field) for name, field in named.items()} | {"prompt_syntax": "a1111"}


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
    mask_blur: float = field_of(COMMON["mask_blur"], 4)
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    denoising_strength: float = field_of(COMMON["strength"], 0.75)
