"""The picture that the whole pipeline draws from the same latents, and what the sample's pictures show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.runtime.pipeline import TextToImagePipeline, to_pil
from sdflow.verify.distance import largest_difference, psnr, ssim
from sdflow.verify.reference import PICTURE_FILE, SAMPLE_FILE
from sdflow.verify.result import MeaningVerdict, PictureVerdict
from sdflow.verify.selection import Selection

if TYPE_CHECKING:
    import numpy as np

CLOSE_ENOUGH = {"float32": 60.0, "float16": 35.0}
"""Decibels at which a picture passes whatever fp16 PyTorch's has: no difference that anyone sees."""
DECIBELS_BEHIND = 6.0
"""A float16 pipeline's picture may have so much less than plain fp16 PyTorch's: twice the error."""
ASTRAY = 30.0
"""Where plain fp16 PyTorch's picture has less, rounding alone leads this trajectory astray: nothing follows from it."""
POINTS = 0.02
"""How far the sample's score may be from PyTorch's."""
AMPLIFIED = 10
"""The difference image shows the differences so many times as large."""


@dataclass(frozen=True)
class Drawn:
    """The picture, (rows, columns, 3), and those of the sample's cases, (cases, rows, columns, 3), in [0, 1]."""

    picture: np.ndarray
    sample: np.ndarray | None


def draw(pipeline: TextToImagePipeline, selection: Selection, reference: Path) -> Drawn:
    """Draw with the artifacts what the reference drew."""
    import numpy as np
    import torch

    with np.load(reference / PICTURE_FILE) as stored:
        latents = stored["latents"]
    picture = pipeline(
        selection.prompts[0],
        latents=latents,
        height=selection.rows * pipeline.vae_scale,
        width=selection.columns * pipeline.vae_scale,
        num_inference_steps=selection.steps,
        guidance_scale=selection.guidance_scale,
        generator=torch.Generator().manual_seed(selection.seed),
        output_type="np",
    ).images
    sample = None
    if selection.sample_cases:
        from sdflow.samples.prompts import evaluation_set, first_latents

        cases = evaluation_set()[: selection.sample_cases]
        sample = pipeline(
            [case.prompt for case in cases],
            latents=np.stack([first_latents(case.seed) for case in cases]),
            num_inference_steps=selection.sample_steps,
            guidance_scale=selection.guidance_scale,
            output_type="np",
        ).images
    return Drawn(np.asarray(picture)[0], None if sample is None else np.asarray(sample))


def judge_picture(
    picture: np.ndarray, selection: Selection, reference: Path, precision: str, out: Path
) -> PictureVerdict:
    """Compare with fp32 PyTorch's picture; write both and their difference as PNG files into `out`."""
    import numpy as np

    with np.load(reference / PICTURE_FILE) as stored:
        exact, half = stored["float32"], stored["float16"]
    difference = np.clip(np.abs(picture - exact) * AMPLIFIED, 0, 1)
    names = ("pytorch", "artifact", "difference")
    for name, image in zip(names, to_pil(np.stack([exact, picture, difference])), strict=True):
        image.save(out / f"{name}.png")
    ours, plain = psnr(picture, exact), psnr(half, exact)
    enough = CLOSE_ENOUGH[precision]
    if precision == "float16":
        enough = min(enough, plain - DECIBELS_BEHIND) if plain >= ASTRAY else 0.0
    problems: tuple[tuple[str, str], ...] = ()
    if not ours >= enough:
        problems = (
            (
                f"the picture has a PSNR of {ours:.1f} dB to PyTorch's from the same latents, plain fp16 PyTorch's has "
                f"{plain:.1f}; at least {enough:.1f} is asked for",
                "If every submodel passes, the scheduler or the tokenizer differs from the checkpoint's.",
            ),
        )
    return PictureVerdict(
        psnr=_finite(ours),
        ssim=ssim(picture, exact),
        largest_difference=largest_difference(picture, exact),
        float16_psnr=_finite(plain),
        float16_ssim=ssim(half, exact),
        float16_largest_difference=largest_difference(half, exact),
        prompt=selection.prompts[0],
        steps=selection.steps,
        height=picture.shape[0],
        width=picture.shape[1],
        problems=problems,
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def judge_meaning(sample: np.ndarray | None, selection: Selection, reference: Path) -> MeaningVerdict | None:
    """The sample's own score of these pictures, against that of PyTorch's."""
    import numpy as np

    if sample is None:
        return None
    from sdflow.samples.prompts import evaluation_set
    from sdflow.samples.score import tally

    cases = evaluation_set()[: selection.sample_cases]
    with np.load(reference / SAMPLE_FILE) as stored:
        exact = tally(cases, to_pil(stored["float32"])).colour_and_kind
    ours = tally(cases, to_pil(sample)).colour_and_kind
    problems: tuple[tuple[str, str], ...] = ()
    if abs(ours - exact) > POINTS:
        problems = (
            (
                f"{ours:.0%} of {len(cases)} pictures show what was asked for, PyTorch's do in {exact:.0%}",
                "Look at the submodels' distances and at the picture.",
            ),
        )
    return MeaningVerdict(len(cases), exact, ours, problems)
