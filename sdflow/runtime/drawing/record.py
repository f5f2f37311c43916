"""Settings that a pipeline writes into its images: those of the call, and the model's defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.families.settings import COMMON
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.request import Request
from sdflow.families.shared.sampler_names import scheduler_name
from sdflow.machine.packages import versions
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.image_text import APPROXIMATION, SCHEDULER_NAME, SETTINGS, image_text
from sdflow.runtime.files.words import words_named

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Record = Mapping[str, Any]


def folder_record(folder: Path, target: str) -> Record:
    """Return the settings shared by all images of a pipeline folder."""
    if not (folder / MANIFEST_FILE).exists():
        return {"target": target, "versions": versions()}
    built = read_manifest(folder)
    named = {"pipeline": built.origin.name, "artifacts": built.artifacts}
    return {**named, "target": target, "versions": versions()}


def scheduler_settings(scheduler: Any) -> dict[str, str]:
    """Return a scheduler's class and, if known, its name."""
    name = scheduler_name(scheduler)
    return {"scheduler": type(scheduler).__name__, **({} if name is None else {SCHEDULER_NAME: name})}


def records(
    own: Record,
    request: Request,
    fewer: Approximation,
    generator: torch.Generator | list[torch.Generator] | None,
    inputs: Mapping[str, bool],
    **settings: Any,
) -> list[Record]:
    """Return the settings of each image. own: the pipeline's. inputs: which inputs it has besides the prompt. settings:
    by their names in `sdflow.families.settings`. Seeds are only known if each image has its own generator."""
    count = len(request.prompts)
    alone = [] if generator is None else generator if isinstance(generator, list) else [generator]
    seeds = [each.initial_seed() for each in alone] if len(alone) == count else [None] * count
    texts = [*request.prompts, *(request.negatives or ())]
    words = words_named(texts, request.reading) if request.reading.words else []
    shared = {
        **own,
        **request.more,
        **settings,
        "prompt_syntax": request.reading.syntax,
        **({APPROXIMATION: fewer.settings()} if fewer else {}),
        **{name: {} for name, there in inputs.items() if there},
        **({"embeddings": {word: {} for word in words}} if words else {}),
    }
    given = {
        name: value
        for name, value in shared.items()
        if value is not None and (name not in COMMON or value != COMMON[name].default)
    }
    return [
        {
            **{name: _of_image(value, index) for name, value in given.items()},
            "prompt": prompt,
            "negative_prompt": None if request.negatives is None else request.negatives[index],
            **({} if seeds[index] is None else {"seed": seeds[index]}),
        }
        for index, prompt in enumerate(request.prompts)
    ]


def _of_image(value: Any, index: int) -> Any:
    """Return the image's own text from a list of texts; anything else unchanged."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value[index] if texts and index < len(value) else value


def with_record(image: Image, record: Record) -> Image:
    """Attach the settings to the image."""
    from sdflow.runtime.drawing.drawn_image import DrawnImage

    image.__class__ = DrawnImage
    image.info.update(image_text({**record, "size": list(image.size)}))
    return image


def with_more(image: Image, more: Record) -> Image:
    """Add further settings to the image's."""
    return with_record(image, {**json.loads(image.info[SETTINGS]), **more})
