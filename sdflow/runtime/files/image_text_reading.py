"""Read an image's settings from its file's text, written by sdflow, A1111's webui (and its forks), or InvokeAI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import parse_json
from sdflow.errors import UsageError
from sdflow.families.settings import ALL, COMMON, Settings, settings_of
from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, REUSE
from sdflow.families.shared.sampler_names import invokeai_scheduler, scheduler_of
from sdflow.parameter import require_values
from sdflow.runtime.files.image_text import (
    APPROXIMATION,
    INVOKEAI_METADATA,
    NEGATIVE,
    PARAMETERS,
    SCHEDULER_NAME,
    SETTINGS,
)

LORA = re.compile(r"<lora:([^:<>]+)(?::([^<>]*))?>")
"""Pattern of a LoRA and its scale in A1111's prompts."""

OTHER_INPUTS = ("image", "mask", "controls", "image_prompts", "references", "embeddings")
"""Further inputs that the text may name without including them."""


@dataclass(frozen=True)
class ImageSettings:
    """Settings of an image. program: the writer of the text. settings: by the names of `Settings`, without unknown
    ones.
    inputs: its further inputs, of OTHER_INPUTS. notes: what cannot be reproduced."""

    program: str
    prompt: str
    settings: Mapping[str, Any]
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> int | None:
        """Seed of the image's noise."""
        seed: int | None = self.settings.get("seed")
        return seed

    def call_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a pipeline's call: `pipe(found.prompt, **found.call_arguments())`. The same
        image also needs a generator with the seed."""
        given = {name: value for name, value in self.settings.items() if value != {} and name != "refiner_start"}
        return Settings(**settings_of(given.items())).call_arguments()


def read_image_settings(path: Path | str) -> ImageSettings:
    """Read the settings of the image in a file. Raises UsageError if the file has none or they cannot be read."""
    from PIL import Image

    where = str(path)
    try:
        with Image.open(path) as image:
            chunks = {name: text for name, text in image.info.items() if isinstance(text, str)}
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot be read as an image: {error}", where=where, remedy="Check the path.") from error
    for name, (program, read) in _READERS.items():
        if name in chunks:
            try:
                found = read(program, chunks[name])
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
                words = f"its text {name!r} is not in {program}'s format: {error!r:.80}"
                raise UsageError(words, where=where, remedy="Pass the settings as options.") from error
            require_values(ALL, found.settings)
            return found
    raise UsageError(
        "the file contains no settings",
        where=where,
        remedy="Use the original PNG from sdflow, A1111's webui, or InvokeAI: editors and websites remove the text.",
    )


def _from_sdflow(program: str, text: str) -> ImageSettings:
    said = parse_json(text)
    if not isinstance(said.get("prompt"), str):
        raise ValueError("no prompt; a contact sheet has several")
    found = {name: value for name, value in said.items() if name in ALL and name != "scheduler"}
    found |= {name: said.get(APPROXIMATION, {}).get(name, {}) for name in (REUSE, GUIDANCE_INTERVAL)}
    found["refiner_start"] = said["refiner"]["start"] if "refiner" in said else 1.0
    if SCHEDULER_NAME in said:
        found["scheduler"] = said[SCHEDULER_NAME]
    if "size" in said:
        found["width"], found["height"] = said["size"]
    notes = _without_loras(each["name"] for each in said.get("loras", ()))
    given = {name: value for name, value in found.items() if value is not None}
    return ImageSettings(program, said["prompt"], given, tuple(each for each in OTHER_INPUTS if each in said), notes)


def infotext_values(text: str) -> dict[str, str]:
    """Return the values in a text of A1111's webui by label: `Prompt`, `Negative prompt`, and those of its last
    line."""
    prompts, _, line = text.strip().rpartition("\n")
    prompt, found, negative = f"\n{prompts}".rpartition(f"\n{NEGATIVE}")
    if not found:
        prompt, negative = negative, ""
    values = {each["label"]: _unquoted(each["value"].strip()) for each in _VALUE.finditer(line)}
    return {"Prompt": prompt.strip(), NEGATIVE.rstrip(":"): negative.strip(), **values}


def _from_webui(program: str, text: str) -> ImageSettings:
    values = infotext_values(text)
    prompt, negative = values.pop("Prompt"), values.pop(NEGATIVE.rstrip(":"))
    numbers = {
        COMMON[name].infotext: name for name in ("steps", "guidance_scale", "strength", "eta", "mask_blur", "seed")
    }
    settings: dict[str, Any] = {
        name: _number(values[label], COMMON[name].kind) for label, name in numbers.items() if label in values
    }
    if "steps" not in settings:
        raise ValueError("no steps")
    notes: tuple[str, ...] = ()
    if any(label.startswith("Hires ") for label in values):  # the strength is hires fix's
        settings.pop("strength", None)
        notes = ("it was upscaled (hires fix), which sdflow does not support",)
    if int(values.get("Clip skip", 1)) > 1:
        settings["clip_skip"] = int(values["Clip skip"]) - 1
    if "Size" in values:
        settings["width"], settings["height"] = map(int, values["Size"].split("x"))
    scheduler, unknown = _scheduler_of(values.get("Sampler"), values.get("Schedule type"))
    if scheduler is not None:
        settings["scheduler"] = scheduler
    names = [name for name, _ in LORA.findall(prompt)]
    if negative := LORA.sub("", negative).strip():
        settings["negative_prompt"] = negative
    inputs = ("mask", "image") if "mask_blur" in settings else ("image",) if "strength" in settings else ()
    return ImageSettings(
        program,
        LORA.sub("", prompt).strip(),
        {**settings, "prompt_syntax": "a1111"},
        inputs,
        (*notes, *unknown, *_without_loras(names)),
    )


_VALUE = re.compile(r'(?P<label>\w[\w /-]{0,60}):(?P<value>\s*"(?:[^"\\]|\\.)*"|[^,]*)(?:,\s*|$)')


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if len(text) > 1 and text[0] == text[-1] == '"' else text


def _number(text: str, kind: Any) -> float | int:
    return int(text) if kind is int else float(text)


def _scheduler_of(sampler: str | None, schedule: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the scheduler for a webui sampler, and notes on what cannot be reproduced."""
    if sampler is None:
        return None, ()
    if (found := scheduler_of(sampler, schedule)) is not None:
        return found, ()
    if (found := scheduler_of(sampler)) is not None:
        return found, (f"the schedule {schedule!r} is not supported; the pipeline's timesteps are used",)
    return None, (f"unknown sampler {sampler!r}; the pipeline's own scheduler is used",)


def _from_invokeai(program: str, text: str) -> ImageSettings:
    said = parse_json(text)
    named = {name: said.get(parameter.invokeai) for name, parameter in COMMON.items() if parameter.invokeai}
    settings = {name: value for name, value in named.items() if value is not None}
    notes: tuple[str, ...] = ()
    if (theirs := settings.pop("scheduler", None)) is not None:
        if (found := invokeai_scheduler(str(theirs))) is not None:
            settings["scheduler"] = found
        else:
            notes = (f"unknown scheduler {theirs!r}; the pipeline's own is used",)
    if not settings.get("clip_skip"):
        settings.pop("clip_skip", None)
    loras = [each["model"]["name"] for each in said.get("loras") or ()]
    return ImageSettings(
        program,
        str(said["positive_prompt"]),
        settings,
        ("image",) if "strength" in settings else (),
        (*notes, *_without_loras(loras)),
    )


def _without_loras(names: Any) -> tuple[str, ...]:
    spelled = ", ".join(names)
    return (
        (f"generated without the image's LoRAs ({spelled}); to use them, merge them with sdflow bake",)
        if spelled
        else ()
    )


_READERS: Mapping[str, tuple[str, Callable[[str, str], ImageSettings]]] = {
    SETTINGS: ("sdflow", _from_sdflow),
    INVOKEAI_METADATA: ("InvokeAI", _from_invokeai),
    PARAMETERS: ("A1111's webui", _from_webui),
}
"""Readers by chunk; the first one present is used. sdflow's own chunk has the most detail."""
