"""Compare the image of a base and its refiner with diffusers' two pipelines in sequence.

diffusers' pipelines hand over the latents partway (`denoising_end`, `denoising_start`), in fp32 and in fp16, from the
same noise; the artifacts do the same in the plain loop of `sdflow.verify.images`. One stage or graph is in memory at a
time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sdflow.families import FAMILIES
from sdflow.verify.artifact.graph import RunnableGraph, open_graph, run_graph
from sdflow.verify.images import judge_image, precision_of, text_to_image
from sdflow.verify.reference.inputs import control_images, first_latents
from sdflow.verify.reference.reference import ReferenceRun
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.torch_images import IMAGE_FILE, Embeddings, control_arguments, type_of
from sdflow.verify.result import ImageVerdict

VERSION = 1
"""Part of the key of a verdict. Increase it whenever verdicts may change."""
PREFIX = "ensemble_"
"""Prefix of its image files."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class EnsembleRequest:
    """What the joint image of a base and its refiner is generated from.

    base, refiner: what PyTorch loads; the base's selection and `out` apply to both. folders: of the two pipelines.
    hand_over: the fraction of the way from noise to image at which the refiner takes over.
    """

    base: ReferenceRequest
    refiner: ReferenceRequest
    folders: tuple[Path, Path]
    target: str
    hand_over: float
    threads: int | None = None


def judge_ensemble(request: EnsembleRequest, progress: Progress) -> ImageVerdict:
    """Generate with PyTorch and with the artifacts; the images go to PNG files in the base's `out`."""
    selection, out = request.base.selection, request.base.out
    base, refiner = (ReferenceRun(each, progress) for each in (request.base, request.refiner))
    noise = first_latents(selection, base.latents.channels)
    drawn = _by_torch(base, refiner, noise, request.hand_over)
    np.savez(out / IMAGE_FILE, latents=noise, float32=drawn["float32"], float16=drawn["float16"])
    image, precision = _by_artifacts(request, noise, progress)
    verdict = judge_image(image, selection, out, precision, out, of=PREFIX)
    (out / IMAGE_FILE).unlink()
    return verdict


def _by_torch(base: ReferenceRun, refiner: ReferenceRun, noise: np.ndarray, hand_over: float) -> dict[str, np.ndarray]:
    """The image, float32 (rows, columns, 3) in [0, 1], by precision."""
    import torch

    with torch.no_grad():
        first = dict.fromkeys(("float32", "float16"), torch.from_numpy(noise))
        scale = base.latents.scale
        height, width = (scale * size for size in noise.shape[2:])
        controls = control_images(base.request.selection, len(base.nets), scale)
        end = {
            "denoising_end": hand_over,
            "output_type": "latent",
            "height": height,
            "width": width,
            **control_arguments(controls),
        }
        latents = _both(base, {kind: {"latents": each, **end} for kind, each in first.items()})
        gc.collect()
        begin = {"denoising_start": hand_over, "output_type": "np"}
        drawn = _both(refiner, {kind: {"image": each, **begin} for kind, each in latents.items()})
    return {kind: images[0].astype("float32") for kind, images in drawn.items()}


def _both(run: ReferenceRun, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result of diffusers' pipeline for the first prompt, by precision. given: its arguments, by precision."""
    import torch

    family, selection, texts = run.family, run.request.selection, _texts(run)
    gc.collect()
    shown, _ = run.show()
    gc.collect()
    networks, pipeline = run.stage((family.denoiser, family.decoder, *run.nets))
    run.set_scales(pipeline, shown)

    def drawn(kind: str) -> Any:
        dtype = type_of(texts[kind])
        first = {name: each.to(dtype) for name, each in given[kind].items() if name in ("latents", "image")}
        return pipeline(
            **texts[kind],
            **{**given[kind], **first, **(shown.float32 if kind == "float32" else shown.float16)},
            num_inference_steps=selection.steps,
            guidance_scale=selection.guidance_scale,
            generator=torch.Generator().manual_seed(selection.seed),
        ).images

    run.progress("base and refiner: in float32")
    found = {"float32": drawn("float32")}
    with run.in_half(networks, {}):
        run.progress("base and refiner: in float16")
        found["float16"] = drawn("float16")
    return found


def _texts(run: ReferenceRun) -> dict[str, Embeddings]:
    """The prompt encoded, by precision."""
    selection = run.request.selection
    prompts = selection.prompts[:1]
    networks, pipeline = run.stage(run.family.text_of(run.request.loads))
    exact = run.encoded(pipeline, prompts, guided=run.guided)
    with run.in_half(networks, {}):
        return {"float32": exact, "float16": run.encoded(pipeline, prompts, guided=run.guided)}


def _by_artifacts(request: EnsembleRequest, noise: np.ndarray, progress: Progress) -> tuple[np.ndarray, str]:
    """The image, float32 (rows, columns, 3) in [0, 1], and its precision."""
    selection, place = request.base.selection, request.hand_over
    opened: dict[Path, RunnableGraph] = {}
    precisions: set[str] = set()

    def run(folder: Path, submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a submodel of a folder, opened in place of the previous one."""
        place = folder / submodel
        if place not in opened:
            opened.clear()
            gc.collect()
            progress(f"base and refiner: {submodel}")
            opened[place] = open_graph(place, request.target, threads=request.threads)
            precisions.add(opened[place].precision)
        return run_graph(opened[place], inputs)

    reached = noise
    for part, folder, span in zip(
        (request.base, request.refiner), request.folders, ({"end": place}, {"begin": place}), strict=True
    ):
        family, draw, prompts = FAMILIES[part.family], partial(run, folder), selection.prompts[:1]
        reached = text_to_image(draw, family, folder, prompts, reached, selection.steps, selection, **span)
    return reached[0], precision_of(precisions)
