"""Run all cases of the FLUX.2-klein sample through ONNX Runtime: the 240 prompts and 120 edits that
`samples/klein/evaluate.py` runs with diffusers.

    sdflow run shapes_klein --no-evaluate
    python benchmarks/cpu/klein_sample.py pipelines/shapes_klein [--steps 4] [--threads 1]

Prints the share of images that match the prompt, and of edits that show the whole scene, next to PyTorch's share from
samples/klein/scores.json. The initial latents are those of that evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from samples.klein.edits import evaluation_edits
from samples.klein.evaluate import edits_share, noise
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import KLEIN, evaluation_set
from sdflow.samples.scene import PIXELS, PLAIN, draw
from sdflow.samples.score import tally

SCORES = Path(__file__).parents[2] / "samples/klein/scores.json"
"""Of diffusers' own pipeline."""


def batches(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, count, size))


def drawn(pipeline: Pipeline, prompts: Sequence[str], seeds: Sequence[int], **more: Any) -> list[Image.Image]:
    latents = torch.from_numpy(np.stack([noise(seed) for seed in seeds]))
    images = pipeline(list(prompts), latents=latents, height=PIXELS, width=PIXELS, **more).images
    return [image for image in images if isinstance(image, Image.Image)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="images at a time; an edit is drawn alone")
    given = parser.parse_args()
    pipeline = Pipeline.load(given.pipeline, "cpu", threads=given.threads)
    cases, edits, images = evaluation_set(KLEIN), evaluation_edits(), list[Image.Image]()
    for part in batches(len(cases), given.batch):
        prompts, seeds = [each.prompt for each in cases[part]], [each.seed for each in cases[part]]
        images += drawn(pipeline, prompts, seeds, num_inference_steps=given.steps)
        print(f"{len(images)} of {len(cases)} drawn", file=sys.stderr, flush=True)
    changed: list[Image.Image] = []
    for edit in edits:
        before = Image.fromarray(draw(edit.before, edit.seed, PLAIN))
        changed += drawn(
            pipeline, [edit.instruction], [edit.seed], num_inference_steps=given.steps, references=[before]
        )
    held_out = [index for index, case in enumerate(cases) if case.held_out]
    found = {
        "drawn": asdict(tally(cases, images)),
        "combinations never seen": asdict(tally([cases[i] for i in held_out], [images[i] for i in held_out])),
        "edited": edits_share(edits, changed),
    }
    theirs = json.loads(SCORES.read_text())["scores"].get(str(given.steps), {})
    for name, scores in found.items():
        print(f"{name}:")
        for word, share in scores.items():
            print(f"  {word}: {share}, PyTorch {theirs.get(name, {}).get(word)}")
    right = round(found["drawn"]["colour_and_kind"] * len(cases))
    whole = round(found["edited"]["everything"] * len(edits))
    print(f"{right} of {len(cases)} images show what was asked for, {whole} of {len(edits)} edits the whole scene")


if __name__ == "__main__":
    main()
