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

    sdflow run shapes --no-evaluate with --set of insert_after=OrtTransformersOptimization, limit and smallest=2048 of both
    text_encoder.passes.QuantizeInt4 and unet.passes.QuantizeInt4
    python benchmarks/cpu/quantized_pipeline.py pipelines/shapes_cpu pipelines/shapes_int4

    python benchmarks/cpu/quantized_pipeline.py samples/shapes-klein SIXTEEN FLOAT8 --steps 4 --guidance 1 --device cuda

    sdflow run shapes --target webgpu --no-evaluate --no-verify
    python benchmarks/cpu/quantized_pipeline.py samples/shapes pipelines/shapes-webgpu --device webgpu

All pipelines generate the fixed cases of the sample's evaluation from the same latents, a batch each in turn, in one
process with one thread. Prints the share of images that match the prompt, processor time per image, the size of the
submodels, and PSNR and SSIM of each pipeline's images against the first's. --json: the same in a file.

A pipeline for the CPU runs as usual, as does one for a GPU with --device of its target. Otherwise it is lowered as in
`sdflow verify` and runs in diffusers' loop: its images follow the definitions of its operators, rounded where the target
rounds, and its processor time says nothing about the target. The first folder may be diffusers' own: its pipeline runs
in float32 on --device, for `webgpu` on CUDA where there is a GPU of NVIDIA's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.folder import folder_family, folder_latents
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import KLEIN, SHAPES, ScenePrompt, evaluation_set, first_latents
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


def sample_of(folder: Path) -> str:
    """The sample that a pipeline was built from, by its latents."""
    return SHAPES if noise(folder, 0).shape == first_latents(0).shape else KLEIN


def is_built(folder: Path) -> bool:
    """Whether `sdflow run` made this folder, not diffusers."""
    return named(folder) == MANIFEST_FILE


def named(folder: Path) -> str:
    """The file that says what a folder is."""
    return MANIFEST_FILE if (folder / MANIFEST_FILE).exists() else "model_index.json"


def of_diffusers(folder: Path, steps: int, guidance: float, device: str) -> tuple[str, Draw]:
    """As below, by diffusers' own pipeline of a folder. device: a target; PyTorch runs on CUDA in place of WebGPU."""
    import diffusers

    device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    def draw(prompts: Sequence[str], latents: np.ndarray) -> Sequence[np.ndarray]:
        how = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "np"}
        given = torch.from_numpy(latents).to(device)
        return list(pipeline(prompt=list(prompts), latents=given, height=PIXELS, width=PIXELS, **how).images)

    return f"diffusers in float32 on {device}", draw


def drawing(folder: Path, steps: int, guidance: float, threads: int, device: str) -> tuple[str, Draw]:
    """How a pipeline's images are made on this machine, in words, and what makes them."""
    if not is_built(folder):
        return of_diffusers(folder, steps, guidance, device)
    target = read_manifest(folder).origin.target
    if target in ("cpu", device):
        pipeline = Pipeline.load(folder, target, threads=threads)

        def as_it_is(prompts: Sequence[str], latents: np.ndarray) -> Sequence[np.ndarray]:
            given = torch.from_numpy(latents)
            how = {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "np"}
            return list(pipeline(list(prompts), latents=given, height=PIXELS, width=PIXELS, **how).images)

        return f"as it is, on {target}", as_it_is
    held: dict[str, RunnableGraph] = {}

    def run(submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if submodel not in held:
            held[submodel] = open_graph(folder / submodel, target, threads=threads)
        return run_graph(held[submodel], inputs)

    def lowered(prompts: Sequence[str], latents: np.ndarray) -> Sequence[np.ndarray]:
        what = Selection((), tuple(prompts), steps, guidance, 0, *latents.shape[2:], (), ())
        return list(text_to_image(run, folder_family(folder), folder, prompts, latents, steps, what))

    return f"for {target}, lowered", lowered


def changed(cases: Sequence[ScenePrompt], images: Sequence[Sequence[Image.Image]]) -> tuple[int, int, float]:
    """How many cases the first of two pipelines alone draws right, how many the second alone, and what it gains in points."""
    first, second = (
        [read(image).shows(case.scene) for case, image in zip(cases, drawn, strict=True)] for drawn in images
    )
    pairs = list(zip(first, second, strict=True))
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    return lost, won, 100 * (won - lost) / len(pairs)


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
) -> dict[str, Any]:
    """Print what the pipelines' images of these cases show, those of all but the first compared with its, and return it.
    engines: how each was run."""
    images = {
        folder: [Image.fromarray((255 * image).round().astype("uint8")) for image in found]
        for folder, found in drawn.items()
    }
    found: dict[str, Any] = {}
    reference = next(iter(engines))
    for folder, how in engines.items():
        score, median = tally(cases, images[folder]), 1e3 * statistics.median(taken[folder])
        each = found[folder.name] = {"how": how, "score": asdict(score), "processor_ms": median}
        told = read_manifest(folder).origin.quantized or "not quantized" if is_built(folder) else "not quantized"
        print(f"{folder.name}, {how}: {told}; {score}")
        print(f"  processor time of an image: median {median:.0f} ms")
        if is_built(folder):
            sizes = {name: megabytes(folder, name) for name in read_manifest(folder).parts}
            print(f"  MB: {', '.join(f'{name} {size:.1f}' for name, size in sizes.items())}")
        if folder == reference:
            continue
        lost, won, points = changed(cases, [images[reference], images[folder]])
        each |= {"lost": lost, "won": won, "points": points}
        print(
            f"  colour and kind: {lost} cases right in the first alone, {won} in this one alone: {points:+.2f} points"
        )
        pairs = list(zip(drawn[folder], drawn[reference], strict=True))
        for name, measure in (("PSNR, dB", psnr), ("SSIM", ssim)):
            values = sorted(float(measure(ours, theirs)) for ours, theirs in pairs)
            middle, tenth = statistics.median(values), values[len(values) // 10]
            each[name] = {"median": middle, "tenth": tenth, "least": values[0]}
            print(f"  {name}: median {middle:.4g}, a tenth below {tenth:.4g}, least {values[0]:.4g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+")
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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "webgpu"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = {
        folder: drawing(folder, options.steps, options.guidance, options.threads, options.device)
        for folder in options.pipelines
    }
    shaped = next(folder for folder in options.pipelines if is_built(folder))
    cases = evaluation_set(sample_of(shaped))[: options.cases]
    drawn: dict[Path, list[Any]] = {folder: [] for folder in engines}
    taken: dict[Path, list[float]] = {folder: [] for folder in engines}
    started = time.perf_counter()
    for start in range(options.first, len(cases), options.batch):
        part = cases[start : start + options.batch]
        latents = np.stack([noise(shaped, case.seed) for case in part])
        for folder in [*engines][:: 1 if start // options.batch % 2 else -1]:
            make = partial(engines[folder][1], [case.prompt for case in part], latents)
            content = [digest_file(folder / named(folder)), options.steps, [case.seed for case in part]]
            images, seconds = kept(options.images, digest_json(content), make)
            drawn[folder] += images
            taken[folder].append(seconds / len(part))
        print(
            f"{start + len(part)} of {len(cases)} in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True
        )
    found = report(cases[options.first :], {folder: how for folder, (how, _) in engines.items()}, drawn, taken)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
