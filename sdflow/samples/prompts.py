"""Captions for scenes, in several wordings, and the fixed set of prompts and seeds that a pipeline is scored on."""

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
    "a picture of a {size} {colour} {kind} {position}, {background} background",
    "one {colour} {kind}, {size}, {position}, on {background}",
    "{size} {colour} {kind}, {position}, {background} background",
)
EVALUATION_SEED = 2024
EVALUATION_SEEN, EVALUATION_HELD_OUT = 180, 60


@dataclass(frozen=True)
class Case:
    """One prompt of the evaluation set, the seed of its first latents and the scene that it asks for."""

    prompt: str
    seed: int
    scene: Scene

    @property
    def held_out(self) -> bool:
        """Whether training never showed the scene's combination of colour, kind and background."""
        return is_held_out(self.scene)


def caption(scene: Scene, rng: random.Random) -> str:
    """A caption of the scene in one of several wordings; now and then it leaves size, position or background out."""
    wording = rng.choice(WORDINGS)
    if rng.random() < 0.15:
        wording = wording.replace("{size}", "")
    if rng.random() < 0.35:
        wording = wording.replace("{position}", "")
    if rng.random() < 0.10:
        for part in ("on a {background} background", "on {background}", "{background} background"):
            wording = wording.replace(part, "")
    return _fill(wording, scene, rng)


def full_caption(scene: Scene, rng: random.Random) -> str:
    """A caption that names all five words of the scene."""
    return _fill(rng.choice(WORDINGS), scene, rng)


def _fill(wording: str, scene: Scene, rng: random.Random) -> str:
    text = wording.format(
        size=rng.choice(SIZE_WORDS[scene.size]),
        colour=scene.colour,
        kind=scene.kind,
        background=scene.background,
        position=rng.choice(POSITION_WORDS[scene.position]),
    )
    parts = [" ".join(part.split()) for part in text.split(",")]
    return ", ".join(part for part in parts if part).replace("a orange", "an orange")


def evaluation_set() -> list[Case]:
    """The 240 fixed cases: 180 of combinations seen in training, 60 of combinations held out."""
    rng = random.Random(EVALUATION_SEED)
    scenes = all_scenes()
    seen = rng.sample([s for s in scenes if not is_held_out(s)], EVALUATION_SEEN)
    held_out = rng.sample([s for s in scenes if is_held_out(s)], EVALUATION_HELD_OUT)
    return [Case(full_caption(scene, rng), seed, scene) for seed, scene in enumerate(seen + held_out)]


def first_latents(seed: int) -> NDArray[np.float32]:
    """Unit normal latents [4, 16, 16] that every engine starts a picture from, so that their pictures compare."""
    return np.random.default_rng(seed).standard_normal((4, 16, 16), dtype=np.float32)
