"""Validation of `sdflow generate` requests before anything is loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.atomic_write import require_makable
from sdflow.errors import UsageError, os_errors_as
from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, REUSE, Approximation
from sdflow.families.shared.sampler_names import known_scheduler, require_installed
from sdflow.machine.memory import HOST
from sdflow.manifest import Manifest, read_manifest
from sdflow.parameter import require_values
from sdflow.prompts.reading import Reading
from sdflow.prompts.wildcards import Wildcards
from sdflow.runtime.denoiser.control import Control, require_controls
from sdflow.runtime.denoiser.start import require_size, require_start
from sdflow.runtime.draw_request import PARAMETERS, GenerateRequest
from sdflow.runtime.drawing.devices import require_devices, require_guidance
from sdflow.runtime.drawing.kept import require_blur
from sdflow.runtime.drawing.references import require_references
from sdflow.runtime.files.control_files import ControlFile, require_distinct
from sdflow.runtime.files.folder import (
    folder_adapters,
    folder_defaults,
    folder_family,
    folder_latents,
    folder_task,
    onnx_submodels,
    refiner_of,
)
from sdflow.runtime.files.image_prompt_files import for_adapters
from sdflow.runtime.files.words import read_words
from sdflow.runtime.refiner_requirements import require_exact, require_no_mask
from sdflow.sources.embedding import Embedding
from sdflow.targets import Target

if TYPE_CHECKING:
    from PIL.Image import Image

_NEEDED = {"image": "an image to start from", "mask": "a mask"}


def with_refiner(request: GenerateRequest, built: Manifest) -> GenerateRequest:
    """Add the folder's own refiner unless the caller names one, sets --refiner-start 1, or uses a mask."""
    if request.refiner_start == 1:
        return replace(request, refiner=None, refiner_start=None)
    if request.refiner is not None or built.origin.refiner is None or request.mask is not None:
        return request
    try:
        return replace(request, refiner=refiner_of(request.folder))
    except UsageError as error:
        remedy = "Run the pipeline's workflow again, or disable it with --refiner-start 1."
        raise UsageError(error.what, where=error.where, remedy=remedy) from error


def with_approximation(request: GenerateRequest, built: Manifest) -> tuple[GenerateRequest, Approximation]:
    """Resolve the approximation from the caller or the folder's workflow, and return it with the request. Raises
    UsageError if it cannot be used."""
    found = Approximation.chosen(built.origin.said, request.reuse, request.guidance_interval)
    if request.refiner is not None:
        require_exact(found, "Disable it (--reuse off, --guidance-interval off), or the refiner (--refiner-start 1).")
    chosen = found.settings()
    return replace(request, reuse=chosen.get(REUSE), guidance_interval=chosen.get(GUIDANCE_INTERVAL)), found


def read_whole(folder: Path) -> Manifest:
    """Read the manifest of a pipeline folder. Raises UsageError if a listed file is missing."""
    manifest = read_manifest(folder)
    absent = [name for name in manifest.files if not (folder / name).exists()]
    if absent:  # transformers creates an empty tokenizer from an empty folder
        raise UsageError(
            f"{absent[0]} is missing",
            where=str(folder),
            remedy="Run the pipeline's workflow again; `--copy` needs no cache.",
        )
    return manifest


def check_request(request: GenerateRequest) -> None:
    """Raise UsageError for any problem that is detectable before loading."""
    if not request.prompts:
        raise UsageError("no prompt was given", where="--prompt", remedy="Pass --prompt TEXT or --prompts FILE.")
    if request.scheduler is not None:
        schedulers = folder_family(request.folder).noising.schedulers
        require_installed(known_scheduler(request.scheduler, schedulers=schedulers))
    require_values(PARAMETERS, {name: getattr(request, name) for name in PARAMETERS})
    _check_arguments(request)
    if request.previews is not None and not request.preview:
        raise UsageError("has no effect without previews", where="--preview-with", remedy="Add --preview.")
    require_start(folder_task(request.folder), request.image, request.mask, ("--image FILE", "--mask FILE"))
    for name in request.given():
        needs = PARAMETERS[name].needs if name in PARAMETERS else None
        if needs is not None and getattr(request, needs) is None:
            where = PARAMETERS[name].option(name)
            raise UsageError(f"has no effect without {_NEEDED[needs]}", where=where, remedy=f"Add --{needs} FILE.")
    require_blur(request.mask_blur, request.mask is not None, request.whole, ("--mask-blur", "--mask FILE", "--whole"))
    require_references(
        folder_family(request.folder), onnx_submodels(request.folder), len(request.references), "--reference"
    )
    require_distinct(request.controls)
    nets = folder_family(request.folder).nets(onnx_submodels(request.folder))
    require_controls({each.name: control_of(each, None) for each in request.controls}, list(nets))
    for_adapters(request.image_prompts, folder_adapters(request.folder), lambda path: path)
    require_size(folder_latents(request.folder).granularity, request.height, request.width)
    there = next(path for path in (request.out.absolute(), *request.out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError("not a folder", where=str(there), remedy="Choose another folder with --out.")
    if not os.access(there, os.W_OK):
        raise UsageError("the folder is not writable", where=str(there), remedy="Choose another folder with --out.")
    with os_errors_as("cannot be created", request.out, "Choose another folder with --out."):
        require_makable(request.out)  # os.access is wrong under /proc


def check_devices(request: GenerateRequest, target: Target) -> None:
    """Raise UsageError unless the request can run on as many devices as it asks for."""
    if request.devices == 1:
        return
    where = PARAMETERS["devices"].option("devices")
    if target.name == HOST:
        raise UsageError(
            "the target cpu runs on one device, with all its cores",
            where=where,
            remedy="Leave it out, or use the target cuda.",
        )
    own = folder_defaults(request.folder)[
        "text" if request.image is None else "image" if request.mask is None else "inpaint"
    ]
    for folder in (request.folder, *([] if request.refiner is None else [request.refiner])):
        require_devices(request.devices, folder, target, low_memory=request.low_memory, where=where)
    scale = own.guidance_scale if request.guidance_scale is None else request.guidance_scale
    require_guidance(request.folder, scale, PARAMETERS["guidance_scale"].option("guidance_scale"))


def _check_arguments(request: GenerateRequest) -> None:
    """Check family-specific arguments against the base's family, or the refiner's."""
    family, refiner = folder_family(request.folder), None
    if request.refiner is None:
        if request.refiner_start is not None:
            raise UsageError(
                "has no effect without a refiner", where="--refiner-start", remedy="Add --refiner PIPELINE."
            )
    else:
        read_whole(request.refiner)
        refiner = folder_family(request.refiner)
        require_no_mask(request.mask, "--mask", "Use a mask without --refiner.")
    known = () if refiner is None else refiner.arguments
    own = {name: value for name, value in request.more.items() if name in family.arguments or name not in known}
    family.require_arguments(own, len(request.prompts))
    if refiner is not None:
        taken = {name: value for name, value in request.more.items() if name in known}
        refiner.require_arguments(taken, len(request.prompts))


def control_of(file: ControlFile, image: Image | None) -> Control:
    """Return the Control of a file. image: its image, or None if not opened yet."""
    return Control(image, file.scale, file.start, file.end)


def words_of(request: GenerateRequest, prompts: Sequence[str]) -> list[Embedding]:
    """Read the embeddings that the prompts may name. prompts: all prompts and negative prompts, with wildcards
    resolved. Raises UsageError for files that are not embeddings."""
    texts = [*prompts, *(text for text in request.more.values() if isinstance(text, str))]
    reading = Reading(request.prompt_syntax)
    return read_words(
        request.embeddings, texts, reading, folder=request.embedding_folder, allow_pickle=request.allow_pickle
    )


@dataclass(frozen=True)
class Wanted:
    """An image to generate: its prompts with wildcards resolved, and its seed."""

    prompt: str
    negative_prompt: str | None
    seed: int


def wanted_of(request: GenerateRequest) -> list[Wanted]:
    """Return the images of a request. Raises UsageError for unresolvable wildcards."""
    first = random.SystemRandom().randrange(2**32) if request.seed is None else request.seed
    prompts = [prompt for prompt in request.prompts for _ in range(request.images)]
    negative = request.negative_prompt
    if request.wildcards is None:
        return [Wanted(prompt, negative, first + index) for index, prompt in enumerate(prompts)]
    chosen = Wildcards(request.wildcards)
    return [
        Wanted(chosen.resolve(prompt, seed), None if negative is None else chosen.resolve(negative, seed), seed)
        for seed, prompt in enumerate(prompts, first)
    ]
