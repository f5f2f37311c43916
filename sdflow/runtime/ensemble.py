"""Base and refiner as one pipeline: the base denoises the first part of the way, the refiner the rest.

diffusers calls it an ensemble of expert denoisers (https://arxiv.org/abs/2211.01324). Stable Diffusion XL is designed
for it (https://arxiv.org/abs/2307.01952).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import GUIDANCE_INTERVAL, REUSE, Approximation
from sdflow.manifest import read_manifest
from sdflow.prompts.limits import report
from sdflow.runtime.drawing.drawing import Drawing, OutputType
from sdflow.runtime.drawing.parts import Images
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.drawing.turns import weight_bytes
from sdflow.runtime.files.folder import refiner_of, target_of
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.refiner_requirements import require_exact, require_no_mask
from sdflow.targets import Target

REFINER_START = 0.8
"""Handover point in diffusers' documentation."""

FEW_STEPS = 10
"""With fewer steps, the refiner would have one or none."""


def hand_over(steps: int) -> float:
    """Return the handover point for measurements, at which both models have steps."""
    return REFINER_START if steps >= FEW_STEPS else 0.5


OF_BOTH = (
    *("negative_prompt", "guidance_scale", "num_images_per_prompt", "eta", "generator"),
    *("prompt_syntax", "clip_skip"),
)
"""Arguments passed to both. Family-specific arguments go to the models that support them, all others to the base."""


@dataclass(frozen=True)
class Ensemble:
    """Two pipelines that share a latent space. Raises UsageError otherwise."""

    base: Pipeline
    refiner: Pipeline

    def __post_init__(self) -> None:
        one, other = self.base.latents, self.refiner.latents
        if (one.channels, one.scale, one.factor, one.shift) != (other.channels, other.scale, other.factor, other.shift):
            raise UsageError(
                "its latents differ from the base's", where="refiner", remedy="Use a refiner of the same family."
            )

    @classmethod
    def load(
        cls, folder: Path | str, refiner: Path | str, target: str | Target | None = None, **options: Any
    ) -> Ensemble:
        """Load two pipeline folders; identical submodels are loaded once. target: default: the base's. options: of
        `Pipeline.load`."""
        target = target_of(Path(folder), target)
        mine, theirs = (read_manifest(Path(each)).artifacts for each in (folder, refiner))
        others = [name for name, digest in theirs.items() if mine.get(name) != digest]
        base = Pipeline.load(folder, target, **options, other_weights=sum(weight_bytes(Path(refiner), others).values()))
        shared = {name: each for name, each in base.submodels.items() if mine.get(name) == theirs.get(name)}
        if options.get("embeddings"):  # words are added per text encoder
            shared = {name: each for name, each in shared.items() if name not in base.family.text}
        other_weights = sum(weight_bytes(Path(folder), base.submodels).values())
        return cls(base, Pipeline.load(refiner, target, **options, shared=shared, other_weights=other_weights))

    @classmethod
    def of_folder(cls, folder: Path | str, target: str | Target | None = None, **options: Any) -> Pipeline | Ensemble:
        """Load a pipeline folder, with its refiner if it has one. options: of `Pipeline.load`."""
        refiner = refiner_of(Path(folder))
        return (
            Pipeline.load(folder, target, **options)
            if refiner is None
            else cls.load(folder, refiner, target, **options)
        )

    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        *,
        output_type: OutputType = "pil",
        callback_on_step_end: Callable[[int, int, int], None] | None = None,
        callback_on_preview: Callable[[Preview], None] | None = None,
        **settings: Any,
    ) -> Images:
        """Call the base, then the refiner from `refiner_start` on. settings: see `drawings`. Raises UsageError like
        `Pipeline`."""
        with self.base.place.current():
            for drawing in self.drawings(prompt, image, **settings):
                report(drawing.truncated)
                drawing.run(callback_on_step_end, callback_on_preview)
            return drawing.finish(output_type)

    def drawings(
        self,
        prompt: str | Sequence[str],
        image: Any = None,
        *,
        refiner_start: float = REFINER_START,
        num_inference_steps: int | None = None,
        **given: Any,
    ) -> Iterator[Drawing]:
        """Yield the base's drawing and, when that is done, the refiner's, which continues it.

        refiner_start: fraction of the way from noise to image. given: see `Pipeline.drawing`, including its errors.
        """
        require_no_mask(given.get("mask_image"), "mask_image", "Use a mask without the refiner.")
        fewer = Approximation.of(given.get(REUSE), given.get(GUIDANCE_INTERVAL))
        require_exact(fewer, "Disable it, or use the base alone.")
        own, known = self.base.family.arguments, self.refiner.family.arguments
        steps = num_inference_steps
        if steps is None:
            steps = self.base.defaults["text" if image is None else "image"].steps
        first = {name: value for name, value in given.items() if name in own or name not in known}
        base = self.base.drawing(prompt, image, num_inference_steps=steps, denoising_end=refiner_start, **first)
        yield base
        more = {name: value for name, value in given.items() if name in OF_BOTH or name in known}
        drawing = self.refiner.drawing(
            prompt, base.latents(), num_inference_steps=steps, denoising_start=refiner_start, **more
        )
        refined = {"refiner": {**self.refiner.record, "start": refiner_start}}
        drawing.records = [{**record, **refined} for record in base.records]
        yield drawing
