"""Measure how quantization changes prompt adherence, similarity and speed of the sample pipeline, against the
unquantized one.

    sdflow run workflows/shapes_cpu.yaml --no-evaluate
    sdflow run workflows/shapes_int8_cpu.yaml --no-evaluate
    python benchmarks/cpu/quantized_pipeline.py pipelines/shapes_cpu pipelines/shapes_int8_cpu [--cases 240] [--steps 20]

    sdflow run shapes --target cuda --no-evaluate
    sdflow run workflows/shapes_float8_cuda.yaml --no-evaluate
    python benchmarks/cpu/quantized_pipeline.py pipelines/shapes-cuda pipelines/shapes_float8_cuda

    sdflow run shapes_klein --target cuda --no-evaluate, the same with --set transformer.passes.QuantizeFp8.insert_after=...
    python benchmarks/cpu/quantized_pipeline.py pipelines/shapes_klein-cuda pipelines/NAME --steps 4 --guidance 1

    sdflow run shapes_klein --no-evaluate, sdflow run workflows/shapes_klein_int4_cpu.yaml --no-evaluate
    python benchmarks/cpu/quantized_pipeline.py pipelines/shapes_klein pipelines/shapes_klein_int4_cpu --steps 4 --guidance 1

Both pipelines generate the fixed cases of the sample's evaluation from the same latents, a batch each in turn, in one
process with one thread. Prints the share of images that match the prompt, PSNR and SSIM of the second pipeline's images
against the first's, processor time per image, and the size of the submodels.

A pipeline for the CPU runs as usual. One for another target is lowered as in `sdflow verify` and runs in diffusers'
loop: its images follow the definitions of its operators, rounded where the target rounds, and its processor time says
nothing about the target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.digest import digest_file, digest_json
from sdflow.disk.atomic_write import replacing
from sdflow.distance import psnr, ssim
from sdflow.manifest import read_manifest
from sdflow.runtime.files.folder import folder_family, folder_latents
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import ScenePrompt, evaluation_set, first_latents
from sdflow.samples.scene import PIXELS
from sdflow.samples.score import read, tally
from sdflow.verify.artifact.graph import RunnableGraph, open_graph, run_graph
from sdflow.verify.images import text_to_image
from sdflow.verify.reference.selection import Selection

Draw = Callable[[Sequence[str], np.ndarray], Sequence[np.ndarray]]
"""Prompts and latents to images, (rows, columns, 3) in [0, 1]."""


def megabytes(folder: Path, submodel: str) -> float:
    return sum(path.stat().st_size for path in (folder / submodel).resolve().rglob("*")) / 1e6


def noise(folder: Path, seed: int) -> np.ndarray:
    """The first latents of a case: `first_latents` where they have the shape of the shapes' UNet."""
    latents = folder_latents(folder)
    shape = (latents.channels, PIXELS // latents.scale, PIXELS // latents.scale)
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    assert shape != first_latents(seed).shape or np.array_equal(made, first_latents(seed))
    return made


def drawing(folder: Path, steps: int, guidance: float, threads: int) -> tuple[str, Draw]:
    """How a pipeline's images are made on this machine, in words, and what makes them."""
    target = read_manifest(folder).origin.target
    if target == "cpu":
        pipeline = Pipeline.load(folder, "cpu", threads=threads)

        def as_it_is(prompts: Sequence[str], latents: np.ndarray) -> Sequence[np.ndarray]:
            given = torch.from_numpy(latents)
            how = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "np"}
            return list(pipeline(list(prompts), latents=given, height=PIXELS, width=PIXELS, **how).images)

        return "as it is", as_it_is
    held: dict[str, RunnableGraph] = {}

    def run(submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if submodel not in held:
            held[submodel] = open_graph(folder / submodel, target, threads=threads)
        return run_graph(held[submodel], inputs)

    def lowered(prompts: Sequence[str], latents: np.ndarray) -> Sequence[np.ndarray]:
        what = Selection((), tuple(prompts), steps, guidance, 0, *latents.shape[2:], (), ())
        return list(text_to_image(run, folder_family(folder), folder, prompts, latents, steps, what))

    return f"for {target}, lowered", lowered


def changed(cases: Sequence[ScenePrompt], images: Sequence[Sequence[Image.Image]]) -> str:
    """How many cases one of two pipelines draws right and the other does not."""
    first, second = (
        [read(image).shows(case.scene) for case, image in zip(cases, drawn, strict=True)] for drawn in images
    )
    pairs = list(zip(first, second, strict=True))
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    points = 100 * (won - lost) / len(pairs)
    return f"colour and kind: {lost} cases right in the first alone, {won} in the second alone: {points:+.2f} points"


def kept(
    folder: Path | None, name: str, draw: Callable[[], Sequence[np.ndarray]]
) -> tuple[Sequence[np.ndarray], float]:
    """A batch, and the processor time that it took: drawn now, or by an earlier run that kept it in this folder."""
    file = folder / f"{name}.npz" if folder is not None else None
    if file is not None and file.exists():
        with np.load(file) as stored:
            return list(stored["images"]), float(stored["seconds"])
    begun = time.process_time()
    images = draw()
    seconds = time.process_time() - begun
    if file is not None:
        with replacing(file) as temporary, temporary.open("wb") as out:
            np.savez(out, images=np.stack(images), seconds=seconds)
    return images, seconds


def report(
    cases: Sequence[ScenePrompt],
    engines: Mapping[Path, str],
    drawn: Mapping[Path, Sequence[np.ndarray]],
    taken: Mapping[Path, Sequence[float]],
) -> None:
    """Print what two pipelines' images of these cases show. engines: how each was run."""
    images = {
        folder: [Image.fromarray((255 * image).round().astype("uint8")) for image in found]
        for folder, found in drawn.items()
    }
    for folder, how in engines.items():
        sizes = {name: megabytes(folder, name) for name in read_manifest(folder).parts}
        told = read_manifest(folder).origin.quantized or "not quantized"
        print(f"{folder.name}, {how}: {told}; {tally(cases, images[folder])}")
        print(f"  processor time of an image: median {1e3 * statistics.median(taken[folder]):.0f} ms")
        print(f"  MB: {', '.join(f'{name} {size:.1f}' for name, size in sizes.items())}")
    print(changed(cases, [*images.values()]))
    first, second = (drawn[folder] for folder in engines)
    pairs = list(zip(second, first, strict=True))
    for name, measure in (("PSNR, dB", psnr), ("SSIM", ssim)):
        found = sorted(float(measure(ours, theirs)) for ours, theirs in pairs)
        print(
            f"{name}: median {statistics.median(found):.4g}, a tenth below {found[len(found) // 10]:.4g}, least {found[0]:.4g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs=2)
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument(
        "--first", type=int, default=0, help="the cases before it are left out: another process draws them"
    )
    parser.add_argument(
        "--images", type=Path, help="folder that keeps batches: what was drawn with this is not drawn again"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = {
        folder: drawing(folder, options.steps, options.guidance, options.threads) for folder in options.pipelines
    }
    cases = evaluation_set()[: options.cases]
    drawn: dict[Path, list[Any]] = {folder: [] for folder in engines}
    taken: dict[Path, list[float]] = {folder: [] for folder in engines}
    started = time.perf_counter()
    for start in range(options.first, len(cases), options.batch):
        part = cases[start : start + options.batch]
        latents = np.stack([noise(options.pipelines[0], case.seed) for case in part])
        for folder in [*engines][:: 1 if start // options.batch % 2 else -1]:
            make = partial(engines[folder][1], [case.prompt for case in part], latents)
            content = [digest_file(folder / "sdflow.json"), options.steps, [case.seed for case in part]]
            images, seconds = kept(options.images, digest_json(content), make)
            drawn[folder] += images
            taken[folder].append(seconds / len(part))
        print(
            f"{start + len(part)} of {len(cases)} in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True
        )
    report(cases[options.first :], {folder: how for folder, (how, _) in engines.items()}, drawn, taken)


if __name__ == "__main__":
    main()
