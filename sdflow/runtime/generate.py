"""Images to files: what `sdflow generate` does."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.atomic_write import require_makable
from sdflow.digest import digest_file
from sdflow.errors import UsageError
from sdflow.families.few_steps import spelled
from sdflow.families.schedulers import require_known
from sdflow.input_file import read_input
from sdflow.machine.packages import versions
from sdflow.manifest import MANIFEST_FILE, Manifest, read_manifest
from sdflow.prompts.reading import Reading
from sdflow.runtime.control import Control, require_controls
from sdflow.runtime.control_files import ControlFile
from sdflow.runtime.ensemble import REFINER_START, Ensemble
from sdflow.runtime.folder import (
    folder_adapters,
    folder_family,
    folder_latents,
    folder_task,
    onnx_submodels,
    refiner_of,
)
from sdflow.runtime.image_prompt_files import ImagePromptFile, for_adapters
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.preview import Preview
from sdflow.runtime.recorded_tuning import recorded_tuning
from sdflow.runtime.soundness import require_sound
from sdflow.runtime.start import require_size, require_start
from sdflow.runtime.tuning import Tuning
from sdflow.runtime.words import read_words, recorded_words
from sdflow.sources.embedding import Embedding
from sdflow.targets import Target, find_target

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET_FILE = "sheet.png"
PREVIEWS = "previews"
"""The folder for them: one a step, NNN-SEED/STEP.png."""


@dataclass(frozen=True)
class GenerateRequest:
    """What to draw.

    images: how many per prompt, each with a seed of its own: `seed` counts up from one to the next; None: a random
    one. height, width: pixels; None: the image's or the model's. steps, guidance_scale, strength, eta: None: the model's.
    image, mask: files to start from and to draw into. target: None for the one that the folder was built for. batch:
    images drawn at once. threads: of the CPU. refiner: a pipeline folder that takes over at refiner_start, a part of the way
    from noise to image; None: REFINER_START. prompt_syntax, clip_skip: as of `Pipeline.__call__`. embeddings: files of
    textual inversion, FILE or FILE:WORD. check: whether the folder's files are held to their digests. controls: images for
    ControlNets; guess_mode: as of the pipeline. image_prompts: images for IP-Adapters. more: what the pipeline's family takes
    besides. preview: write one after every step, into PREVIEWS of `out`. previews: as of `Pipeline.load`.
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
    controls: Sequence[ControlFile] = ()
    guess_mode: bool = False
    image_prompts: Sequence[ImagePromptFile] = ()
    scheduler: str | None = None
    checker: bool = True
    target: str | None = None
    batch: int = 1
    sheet: bool = True
    low_memory: bool = False
    threads: int | None = None
    refiner: Path | None = None
    refiner_start: float | None = None
    prompt_syntax: str = "plain"
    clip_skip: int | None = None
    embeddings: Sequence[str] = ()
    allow_pickle: bool = False
    preview: bool = False
    previews: Path | None = None
    check: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn:
    """An image. flagged: what the safety checker said; None without one."""

    file: str
    prompt: str
    seed: int
    flagged: bool | None


@dataclass(frozen=True)
class GenerateResult:
    """The images in order; sheet: the contact sheet's file, if there is one. load_seconds: until the first could be
    drawn; draw_seconds: for all of them."""

    images: list[Drawn]
    sheet: str | None
    settings: dict[str, Any]
    load_seconds: float
    draw_seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """What is told on the way. phase: something begins. step: of the images being drawn, steps done and in all."""

    phase: Callable[[str], None] = field(default=lambda text: None)
    step: Callable[[str, int, int], None] = field(default=lambda label, done, total: None)


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError when there are none or it cannot be read."""
    try:
        lines = [line.strip() for line in read_input(path).decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="A text file, a prompt a line.") from error
    if not any(lines):
        raise UsageError("there is no prompt in this file", where=str(path), remedy="Write one a line.")
    return [line for line in lines if line]


def generate(request: GenerateRequest, progress: Progress = Progress()) -> GenerateResult:
    """Draw the images into `out`: NNN-SEED.png for each, and a contact sheet for more than one.

    Raises UsageError for what does not fit together, TargetUnavailableError when the provider is not there.
    """
    built = _read_whole(request.folder)
    request = _with_refiner(request, built)
    _check(request)
    words = _words(request)
    image, mask = (None if path is None else _open(path) for path in (request.image, request.mask))
    controls = {each.name: _control(each, _open(each.path)) for each in request.controls}
    shown = for_adapters(request.image_prompts, folder_adapters(request.folder), _open)
    if request.target is not None:
        target = find_target(request.target, "--target")
    else:
        target = find_target(built.origin.target, str(request.folder / MANIFEST_FILE))
    recorded = recorded_tuning(request.folder, target)
    if recorded.note:
        progress.phase(recorded.note)
    progress.phase(f"loading {request.folder} on {target.title}")
    begun = time.perf_counter()
    if request.check:
        _require_sound(request, built)
    pipeline = _load(request, target, recorded.tuning, words)
    loaded = time.perf_counter()

    first = random.SystemRandom().randrange(2**32) if request.seed is None else request.seed
    wanted = [prompt for prompt in request.prompts for _ in range(request.images)]
    drawing = pipeline.base if isinstance(pipeline, Ensemble) else pipeline
    settings = {**_settings(request, drawing, built, target, words), **_refined(request)}
    notes = _told(drawing, built, settings)
    for note in notes:
        progress.phase(note)
    images: list[Image] = []
    drawn: list[Drawn] = []
    for begin in range(0, len(wanted), request.batch):
        prompts = wanted[begin : begin + request.batch]
        seeds = [first + begin + index for index in range(len(prompts))]
        label = (
            f"{begin + 1} of {len(wanted)}"
            if len(prompts) == 1
            else f"{begin + 1}-{begin + len(prompts)} of {len(wanted)}"
        )
        names = [f"{begin + index + 1:03d}-{seed}" for index, seed in enumerate(seeds)]
        callbacks: dict[str, Any] = {"callback_on_step_end": _counted(progress, label)}
        if request.preview:
            callbacks["callback_on_preview"] = _Previews(request.out / PREVIEWS, names).write
        batch, flags = _draw(pipeline, request, prompts, seeds, (image, mask), controls, shown, callbacks)
        for name, made, prompt, seed, flagged in zip(names, batch, prompts, seeds, flags, strict=True):
            file = request.out / f"{name}.png"
            _write(made, file, {**settings, "prompt": prompt, "seed": seed, "size": list(made.size)})
            drawn.append(Drawn(str(file), prompt, seed, flagged))
        images += batch
    sheet = None
    if request.sheet and len(images) > 1:
        from sdflow.samples.sheet import sheet as contact_sheet

        sheet = request.out / SHEET_FILE
        content = {**settings, "prompts": [each.prompt for each in drawn], "seeds": [each.seed for each in drawn]}
        _write(contact_sheet(images, [each.prompt for each in drawn]), sheet, content)
    done = time.perf_counter()
    return GenerateResult(drawn, str(sheet) if sheet else None, settings, loaded - begun, done - loaded, notes)


def _with_refiner(request: GenerateRequest, built: Manifest) -> GenerateRequest:
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


def _read_whole(folder: Path) -> Manifest:
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


def _require_sound(request: GenerateRequest, built: Manifest) -> None:
    """Whether what is about to be loaded is what was built. Raises VerificationError."""
    folders = {request.folder: built}
    if request.refiner is not None:
        folders[request.refiner] = read_manifest(request.refiner)
    for folder, manifest in folders.items():
        checker = None if request.checker else folder_family(folder).checker
        require_sound(folder, manifest, [name for name in onnx_submodels(folder) if name != checker])


def _check(request: GenerateRequest) -> None:
    """Whatever can be told before anything is loaded."""
    if not request.prompts:
        raise UsageError("there is nothing to draw", where="--prompt", remedy="Give --prompt TEXT or --prompts FILE.")
    if request.scheduler is not None:
        require_known(request.scheduler)
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
    nets = folder_family(request.folder).nets(onnx_submodels(request.folder))
    require_controls({each.name: _control(each, None) for each in request.controls}, list(nets))
    for_adapters(request.image_prompts, folder_adapters(request.folder), lambda path: path)
    require_size(folder_latents(request.folder).granularity, request.height, request.width)
    there = next(path for path in (request.out.absolute(), *request.out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError("this is not a folder", where=str(there), remedy="Name another with --out.")
    if not os.access(there, os.W_OK):
        raise UsageError("nothing can be written here", where=str(there), remedy="Name another with --out.")
    try:
        require_makable(request.out)  # under /proc it looks as if it could be
    except OSError as error:
        raise UsageError(
            f"cannot be made: {error.strerror or error}", where=str(request.out), remedy="Name another with --out."
        ) from error


def _check_arguments(request: GenerateRequest) -> None:
    """Each argument that not all families take, by those that know it: with a refiner, the base or the refiner."""
    family, refiner = folder_family(request.folder), None
    if request.refiner is None:
        if request.refiner_start is not None:
            raise UsageError(
                "it says where a refiner takes over", where="--refiner-start", remedy="Add --refiner PIPELINE."
            )
    else:
        _read_whole(request.refiner)
        refiner = folder_family(request.refiner)
        if request.refiner_start is not None and not 0 < request.refiner_start < 1:
            raise UsageError(
                f"it is {request.refiner_start}", where="--refiner-start", remedy="It must be above 0; 1 is without it."
            )
        if request.mask is not None:
            raise UsageError(
                "a refiner draws the whole image, and would not keep what is behind the mask",
                where="--mask",
                remedy="Draw into the mask without --refiner.",
            )
    known = () if refiner is None else refiner.arguments
    own = {name: value for name, value in request.more.items() if name in family.arguments or name not in known}
    family.require_arguments(own, len(request.prompts))
    if refiner is not None:
        taken = {name: value for name, value in request.more.items() if name in known}
        refiner.require_arguments(taken, len(request.prompts))


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot be read as an image: {error}", where=str(path)) from error


def _control(file: ControlFile, image: Image | None) -> Control:
    return Control(image, file.scale, file.start, file.end)


def _words(request: GenerateRequest) -> list[Embedding]:
    more = [text for text in request.more.values() if isinstance(text, str)]
    texts = [*request.prompts, request.negative_prompt or "", *more]
    reading = Reading(request.prompt_syntax)
    return read_words(request.embeddings, texts, reading, allow_pickle=request.allow_pickle)


def _load(request: GenerateRequest, target: Target, tuning: Tuning, words: Sequence[Embedding]) -> Pipeline | Ensemble:
    options: dict[str, Any] = {
        "scheduler": request.scheduler,
        "checker": request.checker,
        "low_memory": request.low_memory,
        "threads": request.threads,
        "tuning": tuning,
        "embeddings": words,
        "previews": request.previews,
    }
    if request.refiner is not None:
        return Ensemble.load(request.folder, request.refiner, target, **options)
    return Pipeline.load(request.folder, target, **options)


def _draw(
    pipeline: Pipeline | Ensemble,
    request: GenerateRequest,
    prompts: list[str],
    seeds: list[int],
    images: tuple[Image | None, Image | None],
    controls: Mapping[str, Control],
    shown: Mapping[str, Any],
    callbacks: Mapping[str, Any],
) -> tuple[list[Image], list[bool | None]]:
    import torch

    image, mask = images
    more: dict[str, Any] = dict(request.more)
    if request.refiner_start is not None:
        more["refiner_start"] = request.refiner_start
    if mask is not None:
        more["mask_image"] = mask
    result = pipeline(
        prompts,
        image,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        strength=request.strength,
        eta=request.eta,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        control=controls,
        **shown,
        guess_mode=request.guess_mode,
        prompt_syntax=request.prompt_syntax,
        clip_skip=request.clip_skip,
        **callbacks,
        **more,
    )
    flags: list[bool | None] = (
        [None] * len(prompts) if result.nsfw_content_detected is None else [*result.nsfw_content_detected]
    )
    return list(result.images), flags


def _counted(progress: Progress, label: str) -> Callable[[int, int, int], None]:
    return lambda index, timestep, total: progress.step(label, index + 1, total)


class _Previews:
    """Writes previews of the images with these names. They are counted over base and refiner."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names, self._count = folder, names, 0

    def write(self, preview: Preview) -> None:
        self._count += 1
        for name, image in zip(self._names, preview.images(), strict=True):
            _write(image, self._folder / name / f"{self._count:03d}.png", {"preview": self._count})


def _told(pipeline: Pipeline, built: Manifest, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the model itself says how it draws, and it is no ordinary one: who says it, and what."""
    if pipeline.defaults == pipeline.family.defaults:
        return ()
    words = built.origin.few_steps.get("because") or "the model's configuration says how it draws"
    used = {name: settings[name] for name in ("steps", "guidance_scale")}
    return (f"{words}: {spelled(used)}, {settings['scheduler']}",)


def _settings(
    request: GenerateRequest, pipeline: Pipeline, built: Manifest, target: Target, words: Sequence[Embedding]
) -> dict[str, Any]:
    """What all images of a run share, as their files tell it: enough to draw them again."""
    own = pipeline.defaults["text" if request.image is None else "image" if request.mask is None else "inpaint"]
    strength = own.strength if request.strength is None else request.strength
    given = {"image": request.image, "mask": request.mask}
    return {
        "negative_prompt": request.negative_prompt,
        "steps": own.steps_at(strength) if request.steps is None else request.steps,
        "strength": None if request.image is None else strength,
        "safety_checker": request.checker,
        "guidance_scale": own.guidance_scale if request.guidance_scale is None else request.guidance_scale,
        "eta": own.eta if request.eta is None else request.eta,
        **({"controls": {each.name: each.settings() for each in request.controls}} if request.controls else {}),
        **({"image_prompts": [each.settings() for each in request.image_prompts]} if request.image_prompts else {}),
        **({"guess_mode": True} if request.guess_mode else {}),
        **request.more,
        **recorded_words(request.prompt_syntax, request.clip_skip, words),
        **{name: {"name": path.name, "sha256": digest_file(path)} for name, path in given.items() if path is not None},
        "scheduler": type(pipeline.scheduler).__name__,
        "target": target.name,
        "pipeline": built.origin.name,
        "artifacts": built.artifacts,
        "versions": versions(),
    }


def _refined(request: GenerateRequest) -> dict[str, Any]:
    """What the settings say of a refiner; nothing without one."""
    if request.refiner is None:
        return {}
    built = read_manifest(request.refiner)
    start = REFINER_START if request.refiner_start is None else request.refiner_start
    return {"refiner": {"pipeline": built.origin.name, "start": start, "artifacts": built.artifacts}}


def _write(image: Image, path: Path, settings: dict[str, Any]) -> None:
    from sdflow.runtime.images import write_png

    try:
        write_png(image, path, settings)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
