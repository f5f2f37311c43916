"""Pydantic models of A1111's webui API.

Clients always send all fields. An unimplemented field is accepted only with a value that turns it off, so that nothing
is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sdflow.config.parameter_fields import Text as Words
from sdflow.config.parameter_fields import field_of
from sdflow.families.settings import COMMON
from sdflow.families.shared.sampler_names import AUTOMATIC, scheduler_of, unknown
from sdflow.families.shared.schedulers import SchedulerRow
from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.http.openai_fields import ControlField

OFF: dict[str, tuple[Any, ...]] = {
    "s_noise": (1,),
    "initial_noise_multiplier": (1,),
    "seed_resize_from_h": (0, -1),
    "seed_resize_from_w": (0, -1),
    "sd_vae": ("Automatic", "None", ""),
}
"""Values besides null that turn a field off. All other fields are off if 0, false or empty."""


class Known(BaseModel):
    """Known fields, and others that are turned off. WITHOUT_EFFECT: fields that do not change images in the webui
    either, unless another is on, and fields about its output files, as nothing is stored here."""

    model_config = ConfigDict(extra="allow")
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _others_are_off(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            off = value is None or (value in OFF[name] if name in OFF else not value)
            if not off and name not in self.WITHOUT_EFFECT and not name.startswith("hr_"):
                raise ValueError(f"{name} {value!r:.60} is not supported by this server; omit it")
        return self


class Options(Known):
    """Settings: the default pipeline, and the text encoder layer to stop at, counted from the last."""

    sd_model_checkpoint: Words | None = None
    CLIP_stop_at_last_layers: Annotated[int | None, Field(ge=1, le=12)] = None


class Unit(Known):
    """A ControlNet unit of the webui's extension. Its image is a map: preprocessors are not implemented."""

    WITHOUT_EFFECT = frozenset(
        ("low_vram", "lowvram", "processor_res", "threshold_a", "threshold_b", "pixel_perfect", "hr_option")
    ) | {"save_detected_map", "inpaint_crop_input_image"}

    enabled: bool = True
    image: str | None = None
    module: str | None = "none"
    model: str = "None"
    weight: float = Field(1.0, ge=-10, le=10)
    guidance_start: float = Field(0.0, ge=0, le=1)
    guidance_end: float = Field(1.0, ge=0, le=1)
    control_mode: str | int = 0
    resize_mode: str | int = 0

    def field(self, start: str | None) -> ControlField:
        """Convert to the server's field. start: image of an img2img request, used if there is none. Raises ApiError."""
        if self.module not in (None, "", "none", "None"):
            words = f"the preprocessor {self.module!r} is not supported; send its output, with the module 'none'"
            raise _refused_unit(words)
        if self.control_mode not in (0, "Balanced"):
            raise _refused_unit(f"the control mode {self.control_mode!r} is not supported, only 'Balanced'")
        if not (image := self.image or start):
            raise _refused_unit(f"the unit of {self.model!r} has no image")
        name, start_at, end_at = self.model.partition(" [")[0], self.guidance_start, self.guidance_end
        return ControlField(name=name, image=image, scale=self.weight, start=start_at, end=end_at)

    def require_shape(self, size: tuple[int, int], drawn: tuple[int, int]) -> None:
        """Raise ApiError for a map that would need cropping or padding: maps are stretched to the generated size."""
        across, down = size
        width, height = drawn
        stretched = self.resize_mode in (0, "Just Resize", "Scale to Fit (Just Resize)")
        if not stretched and across * height != down * width:
            words = f"the image of {self.model!r} is {across}x{down}, another aspect ratio than {width}x{height}"
            raise _refused_unit(f"{words}; resize it, or send resize_mode 'Just Resize'")


def _refused_unit(words: str) -> ApiError:
    return invalid("alwayson_scripts", f"ControlNet: {words}.")


class Text(Known):
    """Generate images from text."""

    WITHOUT_EFFECT = frozenset(
        ("denoising_strength", "firstphase_width", "firstphase_height", "image_cfg_scale", "script_args", "subseed")
    ) | {"s_tmax", "s_tmin", "refiner_switch_at", "do_not_save_samples", "do_not_save_grid", "save_images"}

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
    send_images: bool = True
    override_settings: Options = Field(default_factory=Options)
    override_settings_restore_afterwards: bool = True
    alwayson_scripts: dict[str, Any] = Field(
        default_factory=dict, description="Extensions; only ControlNet is supported."
    )

    def settings(self) -> dict[str, Any]:
        """Return the generation settings by name, except size, seed and scheduler, which have another form here."""
        named = {name: each.webui for name, each in COMMON.items() if each.webui in type(self).model_fields}
        return {name: getattr(self, field) for name, field in named.items()} | {"prompt_syntax": "a1111"}

    def units(self) -> list[Unit]:
        """Return the ControlNet units. Raises ApiError if another extension is on."""
        found: list[Unit] = []
        for name, script in self.alwayson_scripts.items():
            arguments = script.get("args", []) if isinstance(script, dict) else script
            if not isinstance(arguments, list):
                raise invalid("alwayson_scripts", f"the args of {name} must be a list")
            if name.lower() == "controlnet":
                found += [Unit.model_validate(each) for each in arguments if each]
            elif arguments and arguments[0] is not False:
                words = f"the script {name!r} is not supported by this server; omit it."
                raise invalid("alwayson_scripts", words)
        return [unit for unit in found if unit.enabled]

    def scheduler_of(self, schedulers: Mapping[str, SchedulerRow]) -> str | None:
        """Return the scheduler for the sampler and schedule type; None for the pipeline's default. Without a schedule
        type the webui uses the sampler's usual one. Raises ApiError."""
        sampler, schedule = self.sampler_name or self.sampler_index, self.scheduler
        if sampler is None or sampler == AUTOMATIC:
            if schedule in (None, "", AUTOMATIC, AUTOMATIC.lower()):
                return None
            raise invalid("scheduler", f"the schedule type {schedule!r} requires sampler_name.")
        chosen = schedule or (None if sampler in schedulers else AUTOMATIC)  # sdflow's names include the schedule
        found = scheduler_of(sampler, chosen, schedulers)
        if found is None and scheduler_of(sampler, None, schedulers) is not None:
            words = f"{sampler} does not support the schedule type {schedule!r}; see /sdapi/v1/schedulers."
            raise invalid("scheduler", words)
        if found is None:
            raise invalid("sampler_name", f"{unknown(sampler, schedulers)}; see /sdapi/v1/samplers.")
        if self.eta not in (None, 1.0) and found.partition("_a")[1]:
            raise invalid("eta", f"{sampler} with an eta of {self.eta:g} is not supported; send 1.")
        return found


class FromImage(Text):
    """Generate images from a base64-encoded image; with a mask, only in its white part."""

    init_images: list[str] = Field(min_length=1, max_length=1)
    include_init_images: bool = False
    denoising_strength: float = field_of(COMMON["strength"], 0.75)
    mask: str | None = None
    mask_blur: float = field_of(COMMON["mask_blur"], 4)
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    inpainting_fill: int = Field(
        0, ge=0, le=1, description="Start in the masked part from its surroundings (0) or from the image (1)."
    )
    inpaint_full_res: bool = Field(True, description="Generate only the masked part, at the full size.")
    inpaint_full_res_padding: int = Field(0, ge=0, le=4096, description="Pixels around the masked part to include.")
