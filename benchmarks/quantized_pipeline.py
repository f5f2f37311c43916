"""What quantization costs the sample pipeline in meaning and in likeness, and what it saves: beside itself unquantized, in turns.

    sdflow run workflows/shapes_cpu.yaml --no-evaluate
    sdflow run workflows/shapes_int8_cpu.yaml --no-evaluate
    python benchmarks/quantized_pipeline.py pipelines/shapes_cpu pipelines/shapes_int8_cpu [--cases 240] [--steps 20]

Both draw the fixed cases of the sample's evaluation from the same latents, a batch each in turn, in one process with one thread.
Prints the share of images that show what was asked for, PSNR and SSIM of the second pipeline's images to the first's, processor
time of an image, and the size of the submodels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sdflow.distance import psnr, ssim
from sdflow.manifest import read_manifest
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import evaluation_set, first_latents
from sdflow.samples.score import tally


def megabytes(folder: Path, submodel: str) -> float:
    return sum(path.stat().st_size for path in (folder / submodel).resolve().rglob("*")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs=2)
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = {folder: Pipeline.load(folder, "cpu", threads=options.threads) for folder in options.pipelines}
    cases = evaluation_set()[: options.cases]
    drawn: dict[Path, list[Any]] = {folder: [] for folder in engines}
    taken: dict[Path, list[float]] = {folder: [] for folder in engines}
    for start in range(0, len(cases), options.batch):
        part = cases[start : start + options.batch]
        latents = torch.from_numpy(np.stack([first_latents(case.seed) for case in part]))
        for folder in [*engines][:: 1 if start // options.batch % 2 else -1]:
            begun = time.process_time()
            images = engines[folder](
                [case.prompt for case in part],
                latents=latents,
                num_inference_steps=options.steps,
                guidance_scale=7.5,
                output_type="np",
            ).images
            taken[folder].append((time.process_time() - begun) / len(part))
            drawn[folder] += list(images)
    for folder in engines:
        images = [Image.fromarray((255 * image).round().astype("uint8")) for image in drawn[folder]]
        sizes = {name: megabytes(folder, name) for name in read_manifest(folder).parts}
        told = read_manifest(folder).origin.quantized or "not quantized"
        print(f"{folder.name}: {told}; {tally(cases, images)}")
        print(f"  processor time of an image: median {1e3 * statistics.median(taken[folder]):.0f} ms")
        print(f"  MB: {', '.join(f'{name} {size:.1f}' for name, size in sizes.items())}")
    first, second = (drawn[folder] for folder in engines)
    pairs = list(zip(second, first, strict=True))
    for name, measure in (("PSNR, dB", psnr), ("SSIM", ssim)):
        found = sorted(float(measure(ours, theirs)) for ours, theirs in pairs)
        print(
            f"{name}: median {statistics.median(found):.4g}, a tenth below {found[len(found) // 10]:.4g}, least {found[0]:.4g}"
        )


if __name__ == "__main__":
    main()
