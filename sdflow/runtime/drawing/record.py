"""What a pipeline's images say of themselves: the settings of a call, with the model's own where it gave none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.families.image_text import APPROXIMATION, SCHEDULER_NAME, SETTINGS, image_text
from sdflow.families.settings import COMMON
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.request import Request
from sdflow.families.shared.sampler_names import scheduler_name
from sdflow.machine.packages import versions
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.words import words_named

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Record = Mapping[str, Any]


def folder_record(folder: Path, target: str) -> Record:
    """What is the same for all images of a pipeline folder."""
    if not (folder / MANIFEST_FILE).exists():
        return {"target": target, "versions": versions()}
    built = read_manifest(folder)
    named = {"pipeline": built.origin.name, "artifacts": built.artifacts}
    return {**named, "target": target, "versions": versions()}


def scheduler_settings(scheduler: Any) -> dict[str, str]:
    """The class of a scheduler, and its name where it has one."""
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
    """The settings of each image. own: of the pipeline. inputs: what it is drawn from besides the prompt. settings: by the names
    of `sdflow.families.settings`. The seed is known where each image has a generator of its own."""
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
    """Texts in a list are of one image each."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value[index] if texts and index < len(value) else value


def with_record(image: Image, record: Record) -> Image:
    """The image with its text."""
    from sdflow.runtime.drawing.drawn_image import DrawnImage

    image.__class__ = DrawnImage
    image.info.update(image_text({**record, "size": list(image.size)}))
    return image


def with_more(image: Image, more: Record) -> Image:
    """The image, its text with further settings."""
    return with_record(image, {**json.loads(image.info[SETTINGS]), **more})
