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
    image: str = Field(description="In base64.")
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    start: float = Field(0.0, ge=0, le=1)
    end: float = Field(1.0, ge=0, le=1)


class ImagePromptField(Strict):
    """An image for an IP-Adapter of the pipeline."""

    image: str = Field(description="In base64.")
    scale: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


def _from_json(value: Any) -> Any:
    """Decode a list that a form carries as JSON text."""
    if isinstance(value, str):
        return parse_json(value)
    return value


class Fields(Strict):
    """Fields of all requests except generation settings. Those after `partial_images` are sdflow's own."""

    prompt: Text = Field(description="Prompt.")
    model: str | None = Field(None, description="A pipeline of `/v1/models`. Default: the first.")
    n: int | None = Field(1, ge=1, description="How many images.")
    size: str | None = Field(None, description='"auto", or width and height as "512x768". Default: the model\'s own.')
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="url: a data URL, which holds the image itself. The server keeps no image."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="The quality of jpeg and webp.")
    quality: str | None = Field(None, description="Has no effect: see `steps`.")
    style: str | None = Field(None, description="Has no effect.")
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = Field(None, description="Has no effect.")
    user: str | None = Field(None, description="Has no effect.")
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    partial_images: int | None = Field(None, ge=0, description="How many unfinished images are sent on the way.")

    loras: Annotated[list[Lora], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="LoRAs of `/v1/loras`."
    )
    control: Annotated[list[ControlField], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="Images for the pipeline's ControlNets."
    )
    image_prompts: Annotated[list[ImagePromptField], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="Images for its IP-Adapters: all for the only one, or one for each in order."
    )
    references: Annotated[list[str], BeforeValidator(_from_json)] = Field(
        default_factory=list, description="Reference images in base64, for a pipeline that edits with them."
    )
    progress: bool | None = Field(False, description="With `stream`: an event for every step, too.")

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

    input_fidelity: str | None = Field(None, description="Has no effect: see `strength`.")


class Variation(Edit):
    """Generate an image similar to another. OpenAI's request has no prompt."""

    prompt: Text = Field("", description="Prompt.")
