"""Captions for scenes in several wordings, and the fixed prompts and seeds for scoring a pipeline."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdflow.samples.scene import Scene, all_scenes, is_held_out

SIZE_WORDS = {"small": ("small", "little", "tiny"), "medium": ("medium",), "large": ("large", "big", "huge")}
POSITION_WORDS = {
    "middle": ("in the middle", "in the center"),
    "left": ("on the left", "at the left"),
    "right": ("on the right", "at the right"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
}
WORDINGS = (
    "a {size} {colour} {kind} on a {background} background {position}",
    "a {size} {colour} {kind} {position} on a {background} background",
    "a {size} {colour} {kind} on {background}, {position}",
    "{background} background, {size} {colour} {kind}, {position}",
    "{image} of a {size} {colour} {kind} {position}, {background} background",
    "one {colour} {kind}, {size}, {position}, on {background}",
    "{size} {colour} {kind}, {position}, {background} background",
)
SHAPES, KLEIN = "sample:shapes", "sample:shapes-klein"
IMAGE = {SHAPES: "a picture", KLEIN: "an image"}
"""What each sample's training captions call an image. Its tokenizer does not know the other word."""
EVALUATION_SEED, VALIDATION_SEED = 2024, 4048
EVALUATION_SEEN, EVALUATION_HELD_OUT = 180, 60
VALIDATION_FIRST_LATENTS = 100_000


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt of the evaluation set, the seed of its initial latents, and its scene."""

    prompt: str
    seed: int
    scene: Scene

    @property
    def held_out(self) -> bool:
        """Whether the scene's combination of colour, kind and background was excluded from training."""
        return is_held_out(self.scene)


def caption(scene: Scene, rng: random.Random, sample: str = SHAPES) -> str:
    """Return a caption in a random wording, occasionally without size, position or background. sample: a key of IMAGE."""
    wording = rng.choice(WORDINGS)
    if rng.random() < 0.15:
        wording = wording.replace("{size}", "")
    if rng.random() < 0.35:
        wording = wording.replace("{position}", "")
    if rng.random() < 0.10:
        for part in ("on a {background} background", "on {background}", "{background} background"):
            wording = wording.replace(part, "")
    return _fill(wording, scene, rng, sample)


def full_caption(scene: Scene, rng: random.Random, sample: str = SHAPES) -> str:
    """Return a caption with all five words of the scene. sample: a key of IMAGE."""
    return _fill(rng.choice(WORDINGS), scene, rng, sample)


def _fill(wording: str, scene: Scene, rng: random.Random, sample: str) -> str:
    text = wording.format(
        image=IMAGE[sample],
        size=rng.choice(SIZE_WORDS[scene.size]),
        colour=scene.colour,
        kind=scene.kind,
        background=scene.background,
        position=rng.choice(POSITION_WORDS[scene.position]),
    )
    parts = [" ".join(part.split()) for part in text.split(",")]
    return ", ".join(part for part in parts if part).replace("a orange", "an orange")


def evaluation_set(sample: str = SHAPES) -> list[ScenePrompt]:
    """Return the 240 fixed cases: 180 of combinations seen in training, 60 held out. sample: a key of IMAGE."""
    return _cases(EVALUATION_SEED, EVALUATION_SEEN, EVALUATION_HELD_OUT, 0, sample)


def validation_set() -> list[ScenePrompt]:
    """Return 480 other cases for choosing settings, since the evaluation set must not measure what was chosen on it."""
    return _cases(VALIDATION_SEED, 2 * EVALUATION_SEEN, 2 * EVALUATION_HELD_OUT, VALIDATION_FIRST_LATENTS, SHAPES)


def _cases(seed: int, seen: int, held_out: int, first: int, sample: str) -> list[ScenePrompt]:
    rng = random.Random(seed)
    scenes = all_scenes()
    chosen = rng.sample([s for s in scenes if not is_held_out(s)], seen)
    chosen += rng.sample([s for s in scenes if is_held_out(s)], held_out)
    return [ScenePrompt(full_caption(scene, rng, sample), first + index, scene) for index, scene in enumerate(chosen)]


def first_latents(seed: int) -> NDArray[np.float32]:
    """Return unit normal latents [4, 16, 16] that every engine starts from, to make images comparable."""
    return np.random.default_rng(seed).standard_normal((4, 16, 16), dtype=np.float32)
