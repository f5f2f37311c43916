"""Score the sample in FLUX.2-klein's shape with diffusers' own pipeline: drawing on 240 fixed prompts, editing on 120 images.

    python samples/klein/evaluate.py [--folder samples/shapes-klein] [--steps 4] [--out samples/klein]

Writes scores.json and sheet.png. What an image shows is read by sdflow/samples/score.py, which knows no model.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from samples.klein.edits import Edit, evaluation_edits
from sdflow.samples.prompts import KLEIN, evaluation_set
from sdflow.samples.scene import PIXELS, PLAIN, draw
from sdflow.samples.score import read, tally
from sdflow.samples.sheet import sheet

HERE = Path(__file__).parent
SHEET_CASES = (0, 3, 5, 9, 12, 20, 33, 41)


def noise(seed: int) -> np.ndarray:
    """First latents [32, 16, 16] of a case."""
    return np.random.default_rng(seed).standard_normal((32, PIXELS // 8, PIXELS // 8), dtype=np.float32)


def drawn(
    pipeline: Flux2KleinPipeline, prompts: list[str], seeds: list[int], steps: int, batch: int
) -> list[Image.Image]:
    images: list[Image.Image] = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        latents = torch.from_numpy(np.stack([noise(seed) for seed in seeds[part]])).to(pipeline.device, pipeline.dtype)
        images += pipeline(
            prompt=prompts[part], latents=latents, num_inference_steps=steps, height=PIXELS, width=PIXELS
        ).images
    return images


def edited(pipeline: Flux2KleinPipeline, every: list[Edit], steps: int) -> list[Image.Image]:
    images: list[Image.Image] = []
    for each in every:
        latents = torch.from_numpy(noise(each.seed)[None]).to(pipeline.device, pipeline.dtype)
        reference = Image.fromarray(draw(each.before, each.seed, PLAIN))
        images += pipeline(
            image=reference,
            prompt=each.instruction,
            latents=latents,
            num_inference_steps=steps,
            height=PIXELS,
            width=PIXELS,
        ).images
    return images


def edits_share(every: list[Edit], images: list[Image.Image]) -> dict[str, float]:
    """Shares of edits whose image shows all five words of the scene asked for, and whose colour and kind are right."""
    readings = [read(image) for image in images]
    words = ("colour", "kind", "background", "size", "position")
    whole = [all(getattr(r, w) == getattr(e.after, w) for w in words) for r, e in zip(readings, every, strict=True)]
    shown = [r.shows(e.after) for r, e in zip(readings, every, strict=True)]
    return {"cases": len(every), "everything": sum(whole) / len(every), "colour_and_kind": sum(shown) / len(every)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE.parent / "shapes-klein")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=[4])
    parser.add_argument("--batch", type=int, default=24)
    given = parser.parse_args()
    pipeline = Flux2KleinPipeline.from_pretrained(given.folder, torch_dtype=torch.float32).to(given.device)
    pipeline.set_progress_bar_config(disable=True)
    cases, every = evaluation_set(KLEIN), evaluation_edits()
    held_out = [index for index, case in enumerate(cases) if case.held_out]
    found = {}
    for steps in given.steps:
        start = time.monotonic()
        images = drawn(pipeline, [c.prompt for c in cases], [c.seed for c in cases], steps, given.batch)
        changed = edited(pipeline, every, steps)
        found[str(steps)] = {
            "drawn": asdict(tally(cases, images)),
            "combinations never seen": asdict(tally([cases[i] for i in held_out], [images[i] for i in held_out])),
            "edited": edits_share(every, changed),
        }
        print(f"{steps} steps, {time.monotonic() - start:.0f} s: {json.dumps(found[str(steps)])}", flush=True)
        before = [Image.fromarray(draw(every[i].before, every[i].seed, PLAIN)) for i in range(8)]
        rows = [*(images[i] for i in SHEET_CASES), *before, *changed[:8]]
        labels = [
            *(cases[i].prompt for i in SHEET_CASES),
            *["the reference"] * 8,
            *(each.instruction for each in every[:8]),
        ]
        sheet(rows, labels, 8).save(given.out / ("sheet.png" if steps == given.steps[0] else f"sheet_{steps}.png"))
    table = {"device": given.device, "scores": found}
    (given.out / "scores.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
