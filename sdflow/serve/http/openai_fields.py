"""Pydantic models of OpenAI's images API with sdflow's additional fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sdflow.config.parameter_fields import Text, with_fields
from sdflow.disk.input_file import parse_json
from sdflow.families.settings import ALL, SERVED, Settings, settings_of

OF_TEXT = {name: each for name, each in SERVED.items() if each.needs is None}
"""Settings that need no image."""


class Strict(BaseModel):
    """Rejects unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Lora(Strict):
    """A LoRA of the server, by name."""

    name: str = Field(max_length=200)
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


class ControlField(Strict):
    """An image for a ControlNet of the pipeline, by name. `start` and `end` are fractions of the steps."""

    name: str = Field(max_length=200)
    image: str = Field(description="Base64-encoded image file.")
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    start: float = Field(0.0, ge=0, le=1)
    end: float = Field(1.0, ge=0, le=1)


class ImagePromptField(Strict):
    """An image for an IP-Adapter of the pipeline."""

    image: str = Field(description="Base64-encoded image file.")
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


def _from_json(value: Any) -> Any:
    """Decode a list that a form carries as JSON text."""
    if isinstance(value, str):
        return parse_json(value)
    return value


class Fields(Strict):
    """Fields of all requests except generation settings. Those after `partial_images` are sdflow's own."""

    prompt: Text = Field(description="Prompt.")
    model: str | None = Field(None, description="A pipeline listed by `/v1/models`. Default: the first.")
    n: int | None = Field(1, ge=1, description="Number of images.")
    size: str | None = Field(None, description='"auto", or width and height as "512x768". Default: the model\'s own.')
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="`url` returns data URLs, because the server stores no images."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of JPEG and WebP.")
    quality: str | None = Field(None, description="Ignored; use `steps`.")
    style: str | None = Field(None, description="Ignored.")
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = Field(None, description="Ignored.")
    user: str | None = Field(None, description="Ignored.")
    stream: bool | None = Field(False, description="Stream the response as server-sent events.")
    partial_images: int | None = Field(None, ge=0, description="Number of previews per image in a stream.")

    loras: Annotated[list[Lora], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="LoRAs listed by `/v1/loras`."
    )
    control: Annotated[list[ControlField], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="Images for the pipeline's ControlNets."
    )
    image_prompts: Annotated[list[ImagePromptField], BeforeValidator(_from_json)] = Field(
        default_factory=list,
        description="Image prompts: any number for one IP-Adapter, otherwise one for each, in order.",
    )
    references: Annotated[list[str], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="Base64-encoded reference images, for pipelines that support them."
    )
    progress: bool | None = Field(False, description="With `stream`: also send an event for each step.")

    def settings(self) -> Settings:
        """Return the generation settings, without the size."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name in ALL}
        return Settings(**settings_of(given.items()))


@with_fields(OF_TEXT)
class Generation(Fields):
    """Generate images from text."""


@with_fields(SERVED)
class Edit(Fields):
    """Generate images from an image, optionally only in a masked part of it. The form also carries the files."""

    input_fidelity: str | None = Field(None, description="Ignored; use `strength`.")


class Variation(Edit):
    """Generate an image similar to another. OpenAI's request has no prompt."""

    prompt: Text = Field("", description="Prompt.")
