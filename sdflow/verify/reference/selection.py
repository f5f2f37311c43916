"""Choose a verification's inputs: prompts, steps, timesteps and sizes; and describe their coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.errors import UsageError
from sdflow.families.shared.base import Family
from sdflow.samples.prompts import SHAPES
from sdflow.sources import Checkpoint
from sdflow.verify.as_json import from_json
from sdflow.verify.reference.cases import read_description

LARGE_CHANNELS = 512
"""Denoisers with at least this many channels use small latents at the full level too; smaller ones their native
size."""
EDGE_TIMESTEPS = (999.0, 700.3, 1.0, 0.5, 0.0)
QUICK_TIMESTEPS = (999.0, 700.3, 0.5)
"""Both ends, where timesteps may be clipped. Half a step matters most near 0, where a truncated timestep shows. Neither
float16 nor bfloat16 can represent 700.3, and many schedulers give such timesteps: one that passed through either
shows."""
QUICK_LATENTS = 8
"""Rows and columns of the latents at the quick level, if the denoiser's levels allow it."""
QUICK_STEPS, FULL_STEPS = 3, 10
"""Denoising steps; fewer for models made for fewer."""
LENGTH_ARGUMENT = "max_sequence_length"
"""The call argument of diffusers' transformer pipelines for the length to which texts are padded or truncated."""
SHORT_TOKENS = 32
"""Its value at the quick level of large transformers. The pipeline's own, up to 512, would be 30 times the number of
image tokens. All prompts but the long one are shorter, so that padding is covered too."""
SHORT_STEPS = 2
"""Denoising steps at the quick level of large transformers: each reads all weights again."""
SHORT_PATCHES = 4
"""Rows and columns of image tokens at the quick level of large transformers."""
SAMPLE_CASES = 24
PROMPTS = (
    "a photo of an astronaut riding a horse on mars",
    "portrait of an old fisherman, oil painting, warm light",
    "",
    "a small red house beside a frozen lake, winter morning, 35mm",
    "isometric pixel art of a busy street market at night",
)
LONG_PROMPT = "a watercolour painting of a lighthouse by the sea at dusk, " * 8
"""Longer than the 77 tokens of a text encoder, so the tokenizer truncates it."""


@dataclass(frozen=True)
class Selection:
    """Everything that the reference computes. Part of the reference's key, so it is independent of the target.

    prompts: for the text encoders; the image uses the first one. rows, columns: of the trajectory's latents. shapes,
    vae_shapes: (batch, rows, columns) of further latents, for the denoiser and for the VAE. sample_cases: number of
    images of the sample's own evaluation set to generate and score. tokens: value of LENGTH_ARGUMENT; None: the
    pipeline's default.
    """

    submodels: tuple[str, ...]
    prompts: tuple[str, ...]
    steps: int
    guidance_scale: float
    seed: int
    rows: int
    columns: int
    shapes: tuple[tuple[int, int, int], ...]
    vae_shapes: tuple[tuple[int, int, int], ...]
    timesteps: tuple[float, ...] = EDGE_TIMESTEPS
    sample_cases: int = 0
    sample_steps: int = 20
    tokens: int | None = None

    @property
    def text_arguments(self) -> dict[str, Any]:
        """Tokenization arguments for calls of diffusers' pipelines and for a `Request`."""
        return {} if self.tokens is None else {LENGTH_ARGUMENT: self.tokens}

    def coverage(self, family: Family) -> list[str]:
        """The coverage, in words."""
        sizes = _listed(self.shapes)
        if self.vae_shapes != self.shapes and {family.encoder, family.decoder} & {*self.submodels}:
            sizes += f", of the VAE {_listed(self.vae_shapes)}"
        lines = [
            f"{self.steps} denoising steps at latents of {self.rows}x{self.columns}, guidance {self.guidance_scale:g}",
            f"timesteps {', '.join(f'{each:g}' for each in self.timesteps)}; further latents (batch x rows x columns): {sizes}",
        ]
        if {*family.text} & {*self.submodels}:
            length = "" if self.tokens is None else f", of {self.tokens} tokens each"
            lines.append(f"{len(self.prompts)} prompts{length}, including an empty one and one that is too long")
        if self.sample_cases:
            lines.append(f"{self.sample_cases} images of the sample's evaluation set, {self.sample_steps} steps each")
        return lines


def read_selection(reference: Path) -> Selection:
    """The selection of a reference. reference: the folder with its cases."""
    return from_json(Selection, read_description(reference)["selection"])


def _listed(shapes: Sequence[tuple[int, int, int]]) -> str:
    return ", ".join(f"{batch}x{rows}x{columns}" for batch, rows, columns in shapes)


def select(spec: VerifySpec, image: ImageSpec, submodels: Sequence[str], checkpoint: Checkpoint) -> Selection:
    """The selection for these submodels of a checkpoint. Raises UsageError for an unsupported image size."""
    full, family = spec.level == "full", checkpoint.family
    configs = {name: part.load["config"] for name, part in checkpoint.submodels.items()}
    latents = family.latents(configs)
    large = family.part(family.denoiser).model.width(configs[family.denoiser]) >= LARGE_CHANNELS
    own = latents.size
    short = large and not full and LENGTH_ARGUMENT in family.arguments
    small = SHORT_PATCHES * latents.multiple if short else max(QUICK_LATENTS, latents.multiple)
    if full:
        small = 2 * latents.multiple if large else own
    sizes = []
    for name, pixels in (("height", spec.height), ("width", spec.width)):
        if pixels is not None and pixels % latents.granularity:
            raise UsageError(f"verify.{name} is {pixels} pixels", remedy=f"Use a multiple of {latents.granularity}.")
        sizes.append(small if pixels is None else pixels // latents.scale)
    rows, columns = sizes
    shapes = [(2, rows, columns * 2)]
    vae_shapes = [
        (2, max(1, rows // 2), columns)
    ]  # a VAE takes odd numbers of latents too; its work grows with the pixels
    if full:
        shapes = vae_shapes = [(1, rows, columns * 2), (2, rows * 2, columns), (3, rows, columns), (1, own, own)]
    drawn = checkpoint.defaults()["text"]
    guidance = drawn.guidance_scale
    if family.verified_guidance is not None and guidance > 1 and "guidance_scale" not in checkpoint.said:
        guidance = family.verified_guidance
    prompts = list(dict.fromkeys([image.prompt, *(image.prompts if full else ()), *PROMPTS, LONG_PROMPT]))
    drawing = {*family.needed(configs)} <= {*submodels}
    steps = FULL_STEPS if full else SHORT_STEPS if short else QUICK_STEPS
    return Selection(
        submodels=tuple(submodels),
        prompts=tuple(prompts),
        steps=spec.steps or min(steps, drawn.steps),
        guidance_scale=guidance if image.guidance_scale is None else image.guidance_scale,
        seed=image.seed,
        rows=rows,
        columns=columns,
        shapes=tuple(shapes),
        vae_shapes=tuple(vae_shapes),
        timesteps=EDGE_TIMESTEPS if full else QUICK_TIMESTEPS,
        sample_cases=SAMPLE_CASES if full and drawing and checkpoint.reference == SHAPES else 0,
        tokens=SHORT_TOKENS if short else None,
    )
