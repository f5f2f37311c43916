"""The text of a PNG: its image's settings, for sdflow and in formats that other programs read.

The chunk `sdflow` holds the settings as JSON, by the names of `sdflow.families.settings`. From these are derived
`parameters`, the format of A1111's webui and its forks, which ComfyUI imports; and `invokeai_metadata`. The setting's
declaration has its names in other programs (`Parameter.infotext`, `Parameter.invokeai`).
`sdflow.runtime.files.image_text_reading` reads all three.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import sdflow
from sdflow.families.settings import COMMON
from sdflow.families.shared.sampler_names import invokeai_name, webui_names

SETTINGS, PARAMETERS, INVOKEAI_METADATA = "sdflow", "parameters", "invokeai_metadata"
CHUNKS = (SETTINGS, PARAMETERS, INVOKEAI_METADATA)
"""Keywords of the chunks."""

NEGATIVE = "Negative prompt:"
APPROXIMATION = "approximation"
"""Key of the settings for an approximated image: the approximation."""
SCHEDULER_NAME = "scheduler_name"
"""Key of the settings for the scheduler's name as in options; `scheduler` is its class."""


def image_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return an image's text chunks by keyword. settings: JSON-compatible; without a prompt, as for contact sheets,
    only sdflow's chunk is written."""
    chunks = {SETTINGS: json.dumps(settings, ensure_ascii=False, sort_keys=True)}
    if "prompt" in settings:
        chunks[PARAMETERS] = infotext(settings)
        chunks[INVOKEAI_METADATA] = json.dumps(invokeai_metadata(settings))
    return chunks


def infotext(settings: Mapping[str, Any]) -> str:
    """Return the settings in the webui's format: prompt, negative prompt, and a line of settings. A request's LoRAs are
    named in the prompt. The negative prompt's line is always present, because ComfyUI requires it."""
    loras = "".join(f" <lora:{each['name']}:{_spelled(each['scale'])}>" for each in settings.get("loras", ()))
    values = {COMMON[name].infotext: value for name, value in _declared(settings, "infotext").items()}
    if (skipped := settings.get("clip_skip")) is not None:
        values[COMMON["clip_skip"].infotext] = skipped + 1  # there, 1 skips none
    if not values.get("Eta"):
        values.pop("Eta", None)
    scheduler = settings.get(SCHEDULER_NAME)
    if scheduler is not None and (named := webui_names(scheduler)) is not None:
        values["Sampler"], schedule = named
        if schedule is not None:
            values["Schedule type"] = schedule
    if size := _size(settings):
        values["Size"] = f"{size[0]}x{size[1]}"
    if model := settings.get("pipeline"):
        values["Model"] = model
    values["Version"] = f"sdflow {sdflow.__version__}"
    first = [label for label in _FIRST if label in values]
    line = ", ".join(f"{label}: {_quoted(values[label])}" for label in [*first, *(values.keys() - {*first})])
    plain = settings.get("prompt_syntax", "plain") == "plain"
    prompt, negative = (
        _escaped(text) if plain else text for text in (settings["prompt"], settings.get("negative_prompt") or "")
    )
    return f"{prompt}{loras}\n{NEGATIVE} {negative}\n{line}"


_FIRST = (
    *("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model"),
    *("Denoising strength", "Clip skip", "Mask blur", "Eta", "Version"),
)
"""Labels in the webui's order. ComfyUI finds the line by `Steps`."""


def invokeai_metadata(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return InvokeAI's `core_metadata`, without the model, which would have to be one of InvokeAI's own keys."""
    found = {COMMON[name].invokeai: value for name, value in _declared(settings, "invokeai").items()}
    scheduler = settings.get(SCHEDULER_NAME)
    if scheduler is not None and (theirs := invokeai_name(scheduler)) is not None:
        found["scheduler"] = theirs
    if size := _size(settings):
        found["width"], found["height"] = size
    version = f"sdflow {sdflow.__version__}"
    return {"positive_prompt": settings["prompt"], **found, "created_by": "sdflow", "app_version": version}


def _size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return width and height; `size` is that of the image itself."""
    width, height = settings.get("size") or (settings.get("width"), settings.get("height"))
    return (width, height) if width and height else None


def _declared(settings: Mapping[str, Any], program: str) -> dict[str, Any]:
    """Return the settings that a program has a name for, without scheduler and size, which it spells differently."""
    return {
        name: settings[name]
        for name, parameter in COMMON.items()
        if getattr(parameter, program)
        and name not in ("scheduler", "height", "width")
        and settings.get(name) is not None
    }


def _escaped(text: str) -> str:
    """Escape a literal text in the webui's syntax."""
    return re.sub(r"([\\()\[\]])", r"\\\1", text)


def _spelled(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _quoted(value: Any) -> str:
    """Quote a value as JSON if it contains delimiters."""
    text = _spelled(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ",:\n") else text
