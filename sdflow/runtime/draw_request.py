"""What `sdflow generate` is asked for, and whether it fits together: told before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.atomic_write import require_makable
from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.families.approximation import Approximation
from sdflow.families.schedulers import require_known
from sdflow.manifest import Manifest, read_manifest
from sdflow.prompts.reading import Reading
from sdflow.runtime.beside_refiner import require_exact, require_no_mask
from sdflow.runtime.denoiser.control import Control, require_controls
from sdflow.runtime.denoiser.start import require_size, require_start
from sdflow.runtime.drawing.kept import require_blur
from sdflow.runtime.files.control_files import ControlFile
from sdflow.runtime.files.folder import (
    folder_adapters,
    folder_family,
    folder_latents,
    folder_task,
    onnx_submodels,
    refiner_of,
)
from sdflow.runtime.files.image_prompt_files import ImagePromptFile, for_adapters
from sdflow.runtime.files.soundness import require_sound
from sdflow.runtime.files.words import read_words
from sdflow.sources.embedding import Embedding

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class GenerateRequest:
    """What to draw.

    images: how many per prompt, each with a seed of its own: `seed` counts up from one to the next; None: a random
    one. height, width: pixels; None: the image's or the model's. steps, guidance_scale, strength, eta: None: the model's.
    image, mask: files to start from and to draw into; mask_blur, whole: as of the pipeline.
    target: None for the one that the folder was built for. batch: images drawn at once. threads: of the CPU. refiner: a pipeline
    folder that takes over at refiner_start, a part of the way from noise to image; None: REFINER_START. prompt_syntax, clip_skip:
    as of `Pipeline.__call__`. embeddings: files of
    textual inversion, FILE or FILE:WORD. check: whether the folder's files are held to their digests. controls: images for
    ControlNets; guess_mode, vae_tiles: as of the pipeline. image_prompts: images for IP-Adapters. more: what the
    pipeline's family takes besides. reuse, guidance_interval: as of the pipeline; None: as the folder's workflow says; empty:
    none. preview: write
    one after every step, into PREVIEWS of `out`. previews: as of `Pipeline.load`.
    """

    folder: Path
    prompts: Sequence[str]
    out: Path
    negative_prompt: str | None = None
    seed: int | None = None
    images: int = 1
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    strength: float | None = None
    eta: float | None = None
    image: Path | None = None
    mask: Path | None = None
    mask_blur: float = 0.0
    whole: bool = False
    controls: Sequence[ControlFile] = ()
    guess_mode: bool = False
    image_prompts: Sequence[ImagePromptFile] = ()
    scheduler: str | None = None
    checker: bool = True
    target: str | None = None
    batch: int = 1
    sheet: bool = True
    low_memory: bool = False
    vae_tiles: bool | None = None
    threads: int | None = None
    refiner: Path | None = None
    refiner_start: float | None = None
    prompt_syntax: str = "plain"
    clip_skip: int | None = None
    reuse: Mapping[str, float] | None = None
    guidance_interval: Mapping[str, float] | None = None
    embeddings: Sequence[str] = ()
    allow_pickle: bool = False
    preview: bool = False
    previews: Path | None = None
    check: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError when there are none or it cannot be read."""
    try:
        lines = [line.strip() for line in read_input(path).decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="A text file, a prompt a line.") from error
    if not any(lines):
        raise UsageError("there is no prompt in this file", where=str(path), remedy="Write one a line.")
    return [line for line in lines if line]


def with_refiner(request: GenerateRequest, built: Manifest) -> GenerateRequest:
    """With the refiner that the folder names, where the caller names none: not for what it cannot do, and not from the end on."""
    if request.refiner_start == 1:
        return replace(request, refiner=None, refiner_start=None)
    if request.refiner is not None or built.origin.refiner is None or request.mask is not None:
        return request
    try:
        return replace(request, refiner=refiner_of(request.folder))
    except UsageError as error:
        remedy = "Run the pipeline's workflow again, or write --refiner-start 1: without it."
        raise UsageError(error.what, where=error.where, remedy=remedy) from error


def approximation_of(request: GenerateRequest, built: Manifest) -> Approximation:
    """What the images leave out: as the caller says, else as the folder's workflow does. Raises UsageError where it cannot be."""
    found = Approximation.chosen(built.origin.said, request.reuse, request.guidance_interval)
    if request.refiner is not None:
        require_exact(
            found, "Draw without it (--reuse off, --guidance-interval off), or without the refiner: --refiner-start 1."
        )
    return found


def read_whole(folder: Path) -> Manifest:
    """The manifest of a pipeline folder. Raises UsageError when a file that it lists is missing."""
    manifest = read_manifest(folder)
    absent = [name for name in manifest.files if not (folder / name).exists()]
    if absent:  # transformers makes an empty tokenizer of an empty folder
        raise UsageError(
            f"{absent[0]} is missing",
            where=str(folder),
            remedy="Run the pipeline's workflow again; `--copy` needs no cache.",
        )
    return manifest


def require_sound_folders(request: GenerateRequest, built: Manifest) -> None:
    """Whether what is about to be loaded is what was built. Raises VerificationError."""
    folders = {request.folder: built}
    if request.refiner is not None:
        folders[request.refiner] = read_manifest(request.refiner)
    for folder, manifest in folders.items():
        checker = None if request.checker else folder_family(folder).checker
        require_sound(folder, manifest, [name for name in onnx_submodels(folder) if name != checker])


def check_request(request: GenerateRequest) -> None:
    """Whatever can be told before anything is loaded. Raises UsageError."""
    if not request.prompts:
        raise UsageError("there is nothing to draw", where="--prompt", remedy="Give --prompt TEXT or --prompts FILE.")
    if request.scheduler is not None:
        require_known(request.scheduler, schedulers=folder_family(request.folder).noising.schedulers)
    _check_arguments(request)
    if request.guidance_scale is not None and not math.isfinite(request.guidance_scale):
        raise UsageError(
            f"{request.guidance_scale} is no scale", where="--guidance-scale", remedy="Around 7.5 is usual."
        )
    if request.strength is not None and not 0 < request.strength <= 1:
        raise UsageError(f"it is {request.strength}", where="--strength", remedy="It must be above 0 and at most 1.")
    if request.eta is not None and not 0 <= request.eta <= 1:
        raise UsageError(f"it is {request.eta}", where="--eta", remedy="It must be from 0 to 1.")
    if request.previews is not None and not request.preview:
        raise UsageError("it says what draws the previews", where="--preview-with", remedy="Add --preview.")
    require_start(folder_task(request.folder), request.image, request.mask, ("--image FILE", "--mask FILE"))
    if request.strength is not None and request.image is None:
        raise UsageError("it says how much of an image is kept", where="--strength", remedy="Add --image FILE.")
    if request.whole and request.mask is None:
        raise UsageError("it says what becomes of what a mask keeps", where="--whole", remedy="Add --mask FILE.")
    require_blur(request.mask_blur, request.mask is not None, request.whole, ("--mask-blur", "--mask FILE", "--whole"))
    nets = folder_family(request.folder).nets(onnx_submodels(request.folder))
    require_controls({each.name: control_of(each, None) for each in request.controls}, list(nets))
    for_adapters(request.image_prompts, folder_adapters(request.folder), lambda path: path)
    require_size(folder_latents(request.folder).granularity, request.height, request.width)
    there = next(path for path in (request.out.absolute(), *request.out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError("this is not a folder", where=str(there), remedy="Name another with --out.")
    if not os.access(there, os.W_OK):
        raise UsageError("nothing can be written here", where=str(there), remedy="Name another with --out.")
    with os_errors_as("cannot be made", request.out, "Name another with --out."):
        require_makable(request.out)  # under /proc it looks as if it could be


def _check_arguments(request: GenerateRequest) -> None:
    """Each argument that not all families take, by those that know it: with a refiner, the base or the refiner."""
    family, refiner = folder_family(request.folder), None
    if request.refiner is None:
        if request.refiner_start is not None:
            raise UsageError(
                "it says where a refiner takes over", where="--refiner-start", remedy="Add --refiner PIPELINE."
            )
    else:
        read_whole(request.refiner)
        refiner = folder_family(request.refiner)
        if request.refiner_start is not None and not 0 < request.refiner_start < 1:
            raise UsageError(
                f"it is {request.refiner_start}", where="--refiner-start", remedy="It must be above 0; 1 is without it."
            )
        require_no_mask(request.mask, "--mask", "Draw into the mask without --refiner.")
    known = () if refiner is None else refiner.arguments
    own = {name: value for name, value in request.more.items() if name in family.arguments or name not in known}
    family.require_arguments(own, len(request.prompts))
    if refiner is not None:
        taken = {name: value for name, value in request.more.items() if name in known}
        refiner.require_arguments(taken, len(request.prompts))


def control_of(file: ControlFile, image: Image | None) -> Control:
    """What a ControlNet is shown, and how; image: that of the file, None: not opened yet."""
    return Control(image, file.scale, file.start, file.end)


def words_of(request: GenerateRequest) -> list[Embedding]:
    """The learned vectors that the prompts may name. Raises UsageError for files that are none."""
    more = [text for text in request.more.values() if isinstance(text, str)]
    texts = [*request.prompts, request.negative_prompt or "", *more]
    reading = Reading(request.prompt_syntax)
    return read_words(request.embeddings, texts, reading, allow_pickle=request.allow_pickle)
