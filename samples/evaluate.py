"""Score the sample pipeline in PyTorch on the fixed set of prompts and seeds, with and without its LoRAs.

    python samples/evaluate.py --out samples

Writes scores.json and two sheets of images into the folder. `tally` in sdflow/samples/score.py takes any images.
With --validate GUIDANCE ... it scores the base and the LoRAs on other cases at each guidance and writes nothing: settings
are chosen there.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from sdflow.samples.prompts import ScenePrompt, evaluation_set, first_latents, validation_set
from sdflow.samples.score import Score, tally
from sdflow.samples.sheet import sheet

LORAS = ("stripes", "outline")
SHEET_CASES = (0, 3, 5, 9, 12, 20, 33, 41, 57, 66, 181, 190, 200, 210, 222, 231)
SHEET_COLUMNS = 8

Generate = Callable[[Sequence[ScenePrompt]], Sequence[Image.Image]]
"""A pipeline seen from here: cases (prompt, seed) to one image each."""


def generator(pipeline: StableDiffusionPipeline, steps: int, guidance: float, batch: int = 24) -> Generate:
    """A diffusers pipeline as a function from cases to images."""

    def generate(cases: Sequence[ScenePrompt]) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(cases), batch):
            part = cases[start : start + batch]
            latents = torch.from_numpy(np.stack([first_latents(case.seed) for case in part]))
            images += pipeline(
                [case.prompt for case in part],
                latents=latents.to(pipeline.device, pipeline.unet.dtype),
                num_inference_steps=steps,
                guidance_scale=guidance,
            ).images
        return images

    return generate


def set_scales(pipeline: StableDiffusionPipeline, scales: dict[str, float]) -> None:
    """Let each LoRA named work at its scale and the others not at all."""
    pipeline.set_adapters(list(LORAS), [scales.get(name, 0.0) for name in LORAS])


def load_loras(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Load both LoRAs, each as an adapter of its name."""
    for name in LORAS:
        pipeline.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)


def validate(pipeline: StableDiffusionPipeline, samples: Path, steps: int, guidances: Sequence[float]) -> None:
    """Print the scores of the validation cases at each guidance."""
    cases = validation_set()[::2]
    load_loras(pipeline, samples / "loras")
    for guidance in guidances:
        generate = generator(pipeline, steps, guidance, batch=120)
        for names in ((), LORAS[:1], LORAS[1:], LORAS):
            set_scales(pipeline, dict.fromkeys(names, 1.0))
            print(
                f"guidance {guidance:g}, {' and '.join(names) or 'base'}: {tally(cases, generate(cases))}", flush=True
            )


def main() -> None:
    """Make the images of every setting, print and keep their scores."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=Path, default=here, help="folder with shapes/ and loras/")
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--half", action="store_true", help="compute in float16")
    parser.add_argument("--every", type=int, default=1, help="beside the base, score every n-th case only")
    parser.add_argument("--validate", type=float, nargs="+", metavar="GUIDANCE")
    arguments = parser.parse_args()
    sampling = json.loads((here / "settings.json").read_text())["sampling"]
    steps, guidance = sampling["steps"], sampling["guidance"]

    dtype = torch.float16 if arguments.half else torch.float32
    pipeline = StableDiffusionPipeline.from_pretrained(arguments.samples / "shapes", torch_dtype=dtype)
    pipeline.to(arguments.device)
    pipeline.set_progress_bar_config(disable=True)
    if arguments.validate:
        validate(pipeline, arguments.samples, steps, arguments.validate)
        return
    generate = generator(pipeline, steps, guidance)
    every_case = evaluation_set()
    cases = every_case[:: arguments.every]
    held_out = [i for i, case in enumerate(every_case) if case.held_out]
    arguments.out.mkdir(parents=True, exist_ok=True)
    scores: dict[str, Score] = {}

    def keep(name: str, images: Sequence[Image.Image], of: Sequence[ScenePrompt] = cases) -> None:
        scores[name] = tally(of, images)
        print(f"{name}: {scores[name]}", flush=True)

    start = time.monotonic()
    images = generate(every_case)
    print(f"{(time.monotonic() - start) / len(every_case):.3f} s an image")
    keep("base", images, every_case)
    keep("base, held out", [images[i] for i in held_out], [every_case[i] for i in held_out])
    prompts = [every_case[i].prompt for i in SHEET_CASES]
    sheet([images[i] for i in SHEET_CASES], prompts, 8).save(arguments.out / "sheet.png")
    base = images[:: arguments.every]
    keep("base, without guidance", generator(pipeline, steps, 1.0)(cases))
    keep("base, without prompt", generate([replace(case, prompt="") for case in cases]))

    load_loras(pipeline, arguments.samples / "loras")
    rows = [("no LoRA", base)]
    set_scales(pipeline, {})
    zero = generate(cases)
    difference = max(np.abs(np.asarray(a, int) - np.asarray(b, int)).max() for a, b in zip(base, zero, strict=True))
    keep("both LoRAs at scale 0", zero)
    print(f"largest difference of a pixel at scale 0 from the base: {difference}")
    for names, scale in (
        (LORAS[:1], 0.5),
        (LORAS[:1], 1.0),
        (LORAS[1:], 0.5),
        (LORAS[1:], 1.0),
        (LORAS, 0.5),
        (LORAS, 1.0),
    ):
        set_scales(pipeline, dict.fromkeys(names, scale))
        images = generate(cases)
        keep(f"{' and '.join(names)} at scale {scale:g}", images)
        rows.append((f"{' and '.join(names)} {scale:g}", images))

    table = {"steps": steps, "guidance": guidance, "device": arguments.device, "half": arguments.half}
    table |= {"largest_difference_at_scale_0": int(difference), "scores": {k: asdict(s) for k, s in scores.items()}}
    (arguments.out / "scores.json").write_text(json.dumps(table, indent=2) + "\n")
    shown = range(SHEET_COLUMNS)
    grid = [made[i] for _, made in rows for i in shown]
    labels = [f"{name}: {cases[i].prompt}" for name, _ in rows for i in shown]
    sheet(grid, labels, SHEET_COLUMNS).save(arguments.out / "sheet_loras.png")


if __name__ == "__main__":
    main()
