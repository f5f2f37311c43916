"""What the sample edits: one word of a scene is changed, in a sentence that names what it becomes.

`make it green`, `turn the circle into a star`, `put it on a blue background`, `make it small`, `move it to the left`.
"""

import random
from dataclasses import dataclass, replace

from sdflow.samples.prompts import POSITION_WORDS, SIZE_WORDS
from sdflow.samples.scene import BACKGROUNDS, COLOURS, KINDS, POSITIONS, SIZES, Scene, all_scenes, is_held_out

EVALUATION_SEED, EVALUATION_CASES = 2025, 120

_CHOICES = {"colour": COLOURS, "kind": KINDS, "background": BACKGROUNDS, "size": SIZES, "position": POSITIONS}
_WORDINGS = {
    "colour": (
        "make the {kind} {word}",
        "make it {word}",
        "paint the {kind} {word}",
        "change the colour of the {kind} to {word}",
        "a {word} {kind} instead of a {was} one",
    ),
    "kind": (
        "turn the {was} into a {word}",
        "make it a {word}",
        "replace the {was} with a {word}",
        "a {word} instead of the {was}",
    ),
    "background": (
        "put it on a {word} background",
        "make the background {word}",
        "change the background to {word}",
        "put the {kind} on a {word} background",
    ),
    "size": ("make it {word}", "make the {kind} {word}", "a {word} {kind} instead"),
    "position": ("move it to {word}", "move the {kind} to {word}", "put the {kind} {at}"),
}
_TO = {
    "middle": "the middle",
    "left": "the left",
    "right": "the right",
    "top": "the top",
    "bottom": "the bottom",
}


@dataclass(frozen=True)
class Edit:
    """A scene, the sentence, the scene that it asks for, and the seed that both are drawn with."""

    before: Scene
    instruction: str
    after: Scene
    seed: int


def edit(scene: Scene, rng: random.Random, seed: int) -> Edit:
    """One word of the scene changed. A shape never has its background's colour."""
    while True:
        what = rng.choice(list(_CHOICES))
        word = rng.choice(list(_CHOICES[what]))
        after = replace(scene, **{what: word})
        if after != scene and after.colour != after.background:
            break
    if what == "size":
        shown = rng.choice(SIZE_WORDS[word])
    else:
        shown = _TO[word] if what == "position" else word
    text = rng.choice(_WORDINGS[what]).format(
        word=shown,
        was=getattr(scene, what),
        kind=scene.kind,
        at=rng.choice(POSITION_WORDS[word]) if what == "position" else "",
    )
    return Edit(scene, text.replace("a orange", "an orange"), after, seed)


def training_edits(scenes: list[Scene], rng: random.Random, first: int) -> list[Edit]:
    """An edit of each scene, to what is not held out."""
    found = []
    for index, scene in enumerate(scenes):
        while is_held_out((made := edit(scene, rng, first + index)).after):
            continue
        found.append(made)
    return found


def evaluation_edits() -> list[Edit]:
    """120 fixed edits, of scenes and to scenes of any combination."""
    rng = random.Random(EVALUATION_SEED)
    scenes = rng.sample(all_scenes(), EVALUATION_CASES)
    return [edit(scene, rng, 500_000 + index) for index, scene in enumerate(scenes)]
