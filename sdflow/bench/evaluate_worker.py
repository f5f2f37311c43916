"""The evaluating process, `python -m sdflow.bench.evaluate_worker`, started by `sdflow.bench.evaluate`.

It measures sdflow's own engine on one target in more detail than `sdflow bench`: the placement of each node, and the
latency of each submodel besides a whole image's.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sdflow.artifact import MODEL_FILE
from sdflow.bench.evaluate import REQUEST, EvaluationResult, Request, SubmodelResult
from sdflow.bench.latency import Latency, measure
from sdflow.bench.sweep import Settings, SweepPoint, call_options
from sdflow.config.workflow import ImageSpec
from sdflow.errors import SlowerWarning, TiledWarning, UsageError, VerificationError
from sdflow.machine.device import device
from sdflow.machine.packages import versions
from sdflow.manifest import REFINER
from sdflow.models.ports import Sizes
from sdflow.processes.in_worker import peak_memory, serve_request
from sdflow.runtime.drawing.parts import Images
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import (
    every_artifact,
    folder_configs,
    folder_defaults,
    folder_family,
    folder_latents,
    folder_needed,
    load_companions,
    load_submodel,
    onnx_submodels,
    read_options,
    refiner_of,
    submodel_config,
)
from sdflow.runtime.files.images import write_png
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.availability import try_target
from sdflow.runtime.sessions.placement import placement, placement_by_profile
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.targets import TARGETS, Target

Progress = Callable[[str], None]


def run(request: Request, progress: Progress) -> EvaluationResult:
    """Run `evaluated`, and add reasons for slower execution to the result's notes."""
    with warnings.catch_warnings(record=True) as caught:
        for kind in (SlowerWarning, TiledWarning):
            warnings.simplefilter("always", kind)
        try:
            result = evaluated(request, progress)
        finally:
            for each in caught:  # keep them in the log
                print(warnings.formatwarning(each.message, each.category, each.filename, each.lineno), file=sys.stderr)
    slower = [str(each.message) for each in caught if issubclass(each.category, (SlowerWarning, TiledWarning))]
    return replace(result, notes=tuple(dict.fromkeys(slower)))


def evaluated(request: Request, progress: Progress) -> EvaluationResult:
    """Load every submodel, find its nodes' placement, time it, then generate the image.

    Each submodel is timed at its batch in the pipeline: the denoiser 2 with guidance and 1 without; text encoders
    likewise, by the model's own guidance; the others 1. Times include copies between host and device.
    Raises TargetUnavailableError if the provider is missing, VerificationError if it cannot run a graph.
    """
    target = TARGETS[request.target]
    artifacts = every_artifact(request.folder)
    progress(f"{target.title}: trying a tiny model")
    try_target(target)  # later failures are the graph's fault, not the machine's
    if missing := [name for name in folder_needed(request.folder) if name not in onnx_submodels(request.folder)]:
        raise UsageError(
            f"no image can be timed without {' and '.join(missing)}",
            where=request.name,
            remedy="Add the submodel, or write `evaluate: {image: null, latency: null}`.",
        )
    image = as_the_model_draws(request.folder, request.spec.image or ImageSpec())
    loaded: dict[str, Submodel] = {}
    parts: dict[str, SubmodelResult] = {}
    for begins, folder in _folders(request.folder).items():
        for name, inputs in pipeline_inputs(folder, image).items():
            whole = f"{begins}{name}"
            if begins and artifacts[whole] == artifacts.get(name):
                loaded[whole] = loaded[name]
            else:
                parts[whole], loaded[whole] = _evaluate_submodel(request, target, folder, name, inputs, progress)

    denoiser = folder_family(request.folder).denoiser
    for name in (denoiser, f"{REFINER}/{denoiser}"):
        if name in loaded and loaded[name].path is not None:
            loaded[name].unload()  # the pipeline loads parts of it: avoid its weights twice
    pipeline_latency, flagged = _evaluate_pipeline(request, loaded, image, artifacts, progress)
    return EvaluationResult(
        name=request.name,
        target=target.name,
        measured=True,
        provider=parts[denoiser].placement.provider,
        submodels=parts,
        pipeline=pipeline_latency,
        settings={**asdict(image), "denoiser_batch": _denoiser_batch(request.folder, image)},
        image=str(request.image) if request.image and request.spec.image else None,
        nsfw_content_detected=flagged,
        peak_memory_bytes=peak_memory(),
        artifacts=artifacts,
        versions=versions(),
        device=device(target),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        failure=None if request.spec.allow_fallback else failure_of(parts),
    )


def _folders(folder: Path) -> dict[str, Path]:
    """Prefix of submodel names -> folder; the refiner's second."""
    refiner = refiner_of(folder)
    return {"": folder} if refiner is None else {"": folder, f"{REFINER}/": refiner}


def as_the_model_draws(folder: Path, image: ImageSpec) -> ImageSpec:
    """Fill in the model's native height and width in pixels, steps and guidance where the spec has none."""
    own = folder_latents(folder).image_size
    settled = image.settled(folder_defaults(folder)["text"])
    return replace(settled, height=image.height or own, width=image.width or own)


def pipeline_inputs(folder: Path, image: ImageSpec) -> dict[str, dict[str, np.ndarray]]:
    """Submodel -> random inputs with the shapes of a pipeline that generates one such image."""
    family, latents = folder_family(folder), folder_latents(folder)
    configs = folder_configs(folder)
    stepped = (family.denoiser, *family.nets(configs).values())
    batches = {
        **dict.fromkeys(
            family.text_of(configs), family.text_rows(configs, folder_defaults(folder)["text"].guidance_scale)
        ),
        **dict.fromkeys(family.prompters(configs), 2),
        **dict.fromkeys(stepped, _denoiser_batch(folder, image)),
    }
    sizes = Sizes(
        height=image.height or latents.image_size,
        width=image.width or latents.image_size,
        vae_scale=latents.scale,
        more=family.token_sizes(configs),
    )
    return {
        name: family.part(name).of(config).model.dummy(config, replace(sizes, batch=batches.get(name, 1)))
        for name, config in configs.items()
    }


def _denoiser_batch(folder: Path, image: ImageSpec) -> int:
    family = folder_family(folder)
    assert image.guidance_scale is not None, "settled"
    return 2 if family.guided({family.denoiser: submodel_config(folder, family.denoiser)}, image.guidance_scale) else 1


def _evaluate_submodel(
    request: Request, target: Target, folder: Path, name: str, inputs: Mapping[str, np.ndarray], progress: Progress
) -> tuple[SubmodelResult, Submodel]:
    progress(f"{name}: loading")
    begin = time.perf_counter()
    shapes = {key: value.shape for key, value in inputs.items()}
    options = LoadOptions(request.engine_cache, request.threads)
    submodel = load_submodel(folder, name, target, shapes=shapes, options=options)
    session = submodel.bound(**shapes).session  # the running one: on CUDA, for these shapes
    load_seconds = time.perf_counter() - begin
    model = (folder / name / MODEL_FILE).resolve()
    cast = {key: value.astype(submodel.input_types[key]) for key, value in inputs.items()}
    if hasattr(session, "get_provider_graph_assignment_info"):
        placed = placement(session, model)
    else:
        placed = placement_by_profile(model, target, cast, options, shapes)
    latency: Latency | None = None
    if request.spec.latency is not None:
        progress(f"{name}: timing")
        spec = request.spec.latency
        latency = measure(lambda: submodel(**cast), warmup=spec.warmup, runs=spec.runs)
    described = {key: f"{'x'.join(map(str, value.shape))} {value.dtype}" for key, value in cast.items()}
    return SubmodelResult(described, load_seconds, placed, latency), submodel


def _evaluate_pipeline(
    request: Request, loaded: Mapping[str, Submodel], image: ImageSpec, artifacts: Mapping[str, str], progress: Progress
) -> tuple[Latency | None, bool | None]:
    """The latency of a whole image, and whether the safety checker flagged it; writes the image."""
    import torch

    if request.spec.latency is None and request.spec.image is None:
        return None, None
    base, *refiner = (_pipeline(folder, loaded, begins) for begins, folder in _folders(request.folder).items())
    pipeline: Pipeline | Ensemble = Ensemble(base, *refiner) if refiner else base
    steps = max(1 + len(refiner), image.steps or 1)
    assert image.height and image.width and image.guidance_scale is not None, "settled"
    case = SweepPoint(1, image.height, image.width, steps)
    settings = Settings(image.prompt, image.negative_prompt, image.guidance_scale, references=image.references)
    drawn: list[Images] = []

    def draw(prompt: str = image.prompt, seed: int = image.seed) -> Any:
        options = call_options(pipeline, case, replace(settings, prompt=prompt))
        drawn[:] = [pipeline(**options, generator=torch.Generator().manual_seed(seed))]
        return drawn[0].images[0]

    latency: Latency | None = None
    progress("pipeline: drawing")
    if request.spec.latency is None:
        draw()
    else:
        latency = measure(draw, warmup=request.spec.latency.warmup, runs=request.spec.latency.runs)
    if request.spec.image is not None and request.image is not None:
        recorded = {
            **{name: value for name, value in asdict(image).items() if name != "references" or value},
            **{key: value for key, value in call_options(pipeline, case, settings).items() if key == "refiner_start"},
            "steps": steps,
            "scheduler": type(base.scheduler).__name__,
            "target": request.target,
            "artifacts": artifacts,
            "versions": versions(),
        }
        write_png(_sheet(image, draw) if image.prompts else drawn[0].images[0], request.image, recorded)
    flags = drawn[0].nsfw_content_detected
    return latency, None if flags is None else flags[0]


def _pipeline(folder: Path, loaded: Mapping[str, Submodel], begins: str) -> Pipeline:
    """begins: prefix of its submodels' names."""
    own = {name: loaded[f"{begins}{name}"] for name in onnx_submodels(folder)}
    return Pipeline(folder_family(folder), own, load_companions(folder), read_options(folder))


def _sheet(image: ImageSpec, draw: Callable[[str, int], Any]) -> Any:
    from sdflow.samples.sheet import sheet

    return sheet([draw(prompt, image.seed + index) for index, prompt in enumerate(image.prompts)], image.prompts)


def failure_of(parts: Mapping[str, SubmodelResult]) -> str | None:
    """Describe nodes on other providers; None if there are none."""
    messages = []
    for name, part in parts.items():
        try:
            part.placement.require_complete(name)
        except VerificationError as error:
            messages.append(str(error))
    return "\n".join(messages) or None


if __name__ == "__main__":
    serve_request(lambda request, phase: run(REQUEST.validate_python(request), phase).to_json())
