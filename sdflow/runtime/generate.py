"""`sdflow generate`: write images to files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.digest import digest_file
from sdflow.errors import os_errors_as
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.few_steps import spelled
from sdflow.machine.packages import versions
from sdflow.manifest import MANIFEST_FILE, Manifest, read_manifest
from sdflow.prompts.limits import require_texts, truncations
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.drawing.record import scheduler_settings
from sdflow.runtime.ensemble import REFINER_START, Ensemble
from sdflow.runtime.files.folder import folder_adapters, folder_family, import_companions
from sdflow.runtime.files.image_files import open_image
from sdflow.runtime.files.image_prompt_files import for_adapters
from sdflow.runtime.files.image_text import APPROXIMATION
from sdflow.runtime.files.recorded_tuning import recorded_tuning
from sdflow.runtime.files.soundness import require_sound_folders
from sdflow.runtime.files.words import recorded_embeddings
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.request_check import (
    Wanted,
    check_devices,
    check_request,
    control_of,
    read_whole,
    wanted_of,
    with_approximation,
    with_refiner,
    words_of,
)
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.sources.embedding import Embedding
from sdflow.targets import Target, find_target

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET_FILE = "sheet.png"
PREVIEWS = "previews"
"""Folder of previews, one per step: NNN-SEED/STEP.png."""


@dataclass(frozen=True)
class Drawn:
    """A generated image. flagged: result of the safety checker; None without one."""

    file: str
    prompt: str
    seed: int
    flagged: bool | None


@dataclass(frozen=True)
class GenerateResult:
    """Result of `generate`. images: in order. sheet: file of the contact sheet, if any. load_seconds: time to load the
    pipeline; draw_seconds: time for all images."""

    images: list[Drawn]
    sheet: str | None
    settings: dict[str, Any]
    load_seconds: float
    draw_seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """Progress callbacks. phase: receives a phase's name. step: receives a label, the number of steps done, and the
    total."""

    phase: Callable[[str], None] = field(default=lambda text: None)
    step: Callable[[str, int, int], None] = field(default=lambda label, done, total: None)


def generate(request: GenerateRequest, progress: Progress = Progress()) -> GenerateResult:
    """Generate the images into `out`: one NNN-SEED.png each, and a contact sheet if there are several.

    Raises UsageError for conflicting options, and TargetUnavailableError if the provider is unavailable.
    """
    built = read_whole(request.folder)
    request = with_refiner(request, built)
    check_request(request)
    request, fewer = with_approximation(request, built)
    wanted = wanted_of(request)
    texts = {"prompt": [each.prompt for each in wanted], "negative_prompt": [each.negative_prompt for each in wanted]}
    require_texts({**texts, **request.more})
    words = words_of(request, [text for each in wanted for text in (each.prompt, each.negative_prompt or "")])
    image, mask = (None if path is None else open_image(path) for path in (request.image, request.mask))
    controls = {each.name: control_of(each, open_image(each.path)) for each in request.controls}
    shown = for_adapters(request.image_prompts, folder_adapters(request.folder), open_image)
    if request.references:
        shown["references"] = [open_image(path) for path in request.references]
    if request.target is not None:
        target = find_target(request.target, "--target")
    else:
        target = find_target(built.origin.target, str(request.folder / MANIFEST_FILE))
    check_devices(request, target)
    recorded = recorded_tuning(request.folder, target)
    if recorded.note:
        progress.phase(recorded.note)
    progress.phase(f"loading {request.folder} on {target.title}")
    begun = time.perf_counter()
    if request.check:
        require_sound_folders((request.folder, request.refiner), checker=request.checker)
    import_companions(request.folder)  # this process compiles nothing
    first = _first(request) if len(wanted[: request.batch]) == 1 and not fewer else None
    pipeline = _load(request, target, recorded.tuning, words, first)
    loaded = time.perf_counter()

    drawing = pipeline.base if isinstance(pipeline, Ensemble) else pipeline
    settings = _recorded(request, drawing, built, target, words, fewer)
    notes = (*_notes_of_defaults(drawing, built, settings), *_notes_of(fewer))
    for note in notes:
        progress.phase(note)
    images: list[Image] = []
    drawn: list[Drawn] = []
    for begin in range(0, len(wanted), request.batch):
        batch_of = wanted[begin : begin + request.batch]
        prompts, seeds = [each.prompt for each in batch_of], [each.seed for each in batch_of]
        label = (
            f"{begin + 1} of {len(wanted)}"
            if len(prompts) == 1
            else f"{begin + 1}-{begin + len(prompts)} of {len(wanted)}"
        )
        names = [f"{begin + index + 1:03d}-{seed}" for index, seed in enumerate(seeds)]
        callbacks: dict[str, Any] = {"callback_on_step_end": _counted(progress, label)}
        if request.preview:
            callbacks["callback_on_preview"] = _Previews(request.out / PREVIEWS, names).write
        with truncations() as truncated:
            batch, flags, tiles = _draw(
                pipeline,
                request,
                batch_of,
                {"image": image, "mask_image": mask, "control": controls, **shown, **callbacks},
            )
        for note in truncated:
            if note not in notes:
                progress.phase(note)
                notes = (*notes, note)
        tiled = {} if tiles is None else {"vae_tiles": tiles}
        for name, made, each, flagged in zip(names, batch, batch_of, flags, strict=True):
            file = request.out / f"{name}.png"
            _write(made, file, {**settings, **tiled, **asdict(each), "size": list(made.size)})
            drawn.append(Drawn(str(file), each.prompt, each.seed, flagged))
        images += batch
    sheet = None
    if request.sheet and len(images) > 1:
        from sdflow.samples.sheet import sheet as contact_sheet

        sheet = request.out / SHEET_FILE
        content = {**settings, "prompts": [each.prompt for each in drawn], "seeds": [each.seed for each in drawn]}
        _write(contact_sheet(images, [each.prompt for each in drawn]), sheet, content)
    done = time.perf_counter()
    return GenerateResult(drawn, str(sheet) if sheet else None, settings, loaded - begun, done - loaded, notes)


def _first(request: GenerateRequest) -> dict[str, Any] | None:
    """Return the arguments of `Pipeline.prepare` for the first image, if it is drawn from a text of the usual length alone:
    for others, `Pipeline` reads the text before it creates a denoiser."""
    if request.image or request.controls or request.image_prompts or request.references or request.refiner:
        return None
    lengths = folder_family(request.folder).length_arguments
    if request.prompt_syntax != "plain" or request.clip_skip or any(request.more.get(name) for name in lengths):
        return None
    return {"height": request.height, "width": request.width, "guidance_scale": request.guidance_scale}


def _load(
    request: GenerateRequest,
    target: Target,
    tuning: Tuning,
    words: Sequence[Embedding],
    first: Mapping[str, Any] | None,
) -> Pipeline | Ensemble:
    options: dict[str, Any] = {
        "scheduler": request.scheduler,
        "checker": request.checker,
        "low_memory": request.low_memory,
        "keep": request.keep,
        "device_memory": request.device_memory,
        "devices": request.devices,
        "vae_tiles": request.vae_tiles,
        "threads": request.threads,
        "tuning": tuning,
        "embeddings": words,
        "previews": request.previews,
        "first": first,
    }
    if request.refiner is not None:
        return Ensemble.load(request.folder, request.refiner, target, **options)
    return Pipeline.load(request.folder, target, **options)


def _draw(
    pipeline: Pipeline | Ensemble, request: GenerateRequest, wanted: Sequence[Wanted], more: Mapping[str, Any]
) -> tuple[list[Image], list[bool | None], int | None]:
    """Return the images, the checker's flags, and the VAE tile size if tiled. more: arguments of the call besides the
    settings."""
    import torch

    arguments = request.call_arguments() | {"generator": [torch.Generator().manual_seed(each.seed) for each in wanted]}
    if request.negative_prompt is not None:
        arguments["negative_prompt"] = [each.negative_prompt for each in wanted]
    result = pipeline([each.prompt for each in wanted], **more, **arguments)
    flags: list[bool | None] = (
        [None] * len(wanted) if result.nsfw_content_detected is None else [*result.nsfw_content_detected]
    )
    return list(result.images), flags, result.vae_tiles


def _counted(progress: Progress, label: str) -> Callable[[int, int, int], None]:
    return lambda index, timestep, total: progress.step(label, index + 1, total)


class _Previews:
    """Writes previews of the images with these names, numbered across base and refiner."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names, self._count = folder, names, 0

    def write(self, preview: Preview) -> None:
        self._count += 1
        for name, image in zip(self._names, preview.images(), strict=True):
            _write(image, self._folder / name / f"{self._count:03d}.png", {"preview": self._count})


def _notes_of_defaults(pipeline: Pipeline, built: Manifest, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note with the defaults and their source, if the model overrides its family's defaults."""
    if pipeline.defaults == pipeline.family.defaults:
        return ()
    words = built.origin.few_steps.get("because") or "defaults from the model's configuration"
    used = {name: settings[name] for name in ("steps", "guidance_scale")}
    return (f"{words}: {spelled(used)}, {settings['scheduler']}",)


def _recorded(
    request: GenerateRequest,
    pipeline: Pipeline,
    built: Manifest,
    target: Target,
    words: Sequence[Embedding],
    fewer: Approximation,
) -> dict[str, Any]:
    """Return the settings that all images of a run share, written to their files: enough to reproduce them."""
    own = pipeline.defaults["text" if request.image is None else "image" if request.mask is None else "inpaint"]
    strength = own.strength if request.strength is None else request.strength
    given = {"image": request.image, "mask": request.mask}
    found: dict[str, Any] = {
        **request.recorded(),
        "steps": own.steps_at(strength) if request.steps is None else request.steps,
        "strength": None if request.image is None else strength,
        "safety_checker": request.checker,
        "guidance_scale": own.guidance_scale if request.guidance_scale is None else request.guidance_scale,
        "eta": own.eta if request.eta is None else request.eta,
        **recorded_embeddings(words),
        **{name: {"name": path.name, "sha256": digest_file(path)} for name, path in given.items() if path is not None},
        **scheduler_settings(pipeline.scheduler),
        "target": target.name,
        "pipeline": built.origin.name,
        "artifacts": built.artifacts,
        "versions": versions(),
    }
    if request.mask is not None and not request.whole:
        found["mask_blur"] = request.mask_blur
    if request.controls:
        found["controls"] = {each.name: each.settings() for each in request.controls}
    if request.references:
        found["references"] = [{"name": path.name, "sha256": digest_file(path)} for path in request.references]
    if request.image_prompts:
        found["image_prompts"] = [each.settings() for each in request.image_prompts]
    if request.refiner is not None:
        refiner = read_manifest(request.refiner)
        start = REFINER_START if request.refiner_start is None else request.refiner_start
        found["refiner"] = {"pipeline": refiner.origin.name, "start": start, "artifacts": refiner.artifacts}
    if fewer:
        found[APPROXIMATION] = fewer.settings()
    return found


def _notes_of(fewer: Approximation) -> tuple[str, ...]:
    return (f"approximates the model's image: {fewer.spelled()}",) if fewer else ()


def _write(image: Image, path: Path, settings: dict[str, Any]) -> None:
    from sdflow.runtime.files.images import write_png

    with os_errors_as("cannot be written", path):
        write_png(image, path, settings)
