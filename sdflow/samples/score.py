"""Read from its pixels what an image of the sample pipeline shows, and measure how often that matches the prompt.

It only uses the palette and shapes of `scene`, not prompts or models: it finds the background at the image's border,
treats differing pixels as the silhouette, and fits each kind of shape to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sdflow.samples.prompts import ScenePrompt
from sdflow.samples.scene import (
    BACKGROUNDS,
    BLACK,
    COLOURS,
    KINDS,
    OUTLINE_WIDTH,
    PIXELS,
    POSITIONS,
    REACH,
    SIZES,
    STRIPE_PERIOD,
    WHITE,
    Scene,
    distance,
)

Mask = NDArray[np.bool_]  # [PIXELS, PIXELS]
COLOUR_REACH = 75.0  # furthest RGB distance at which a pixel still counts as a palette colour
CONTRAST = 45.0  # RGB distance from the background at which a pixel belongs to the silhouette
BORDER_SHARE = 0.6  # of the image's border must have a single background colour
STRIPE_CONTRAST = 0.6  # maximum distance of a stripe from white, relative to the fill's
FIT = 0.80  # minimum intersection over union of the silhouette with the best kind

_NAMES = [*BACKGROUNDS, "white", "black"]
_PALETTE = np.array([*BACKGROUNDS.values(), WHITE, BLACK], np.float32)
_BLACK = _NAMES.index("black")


@dataclass(frozen=True)
class Reading:
    """What an image shows; None for anything unclear."""

    colour: str | None = None
    kind: str | None = None
    background: str | None = None
    size: str | None = None
    position: str | None = None
    stripes: bool = False
    outline: bool = False
    fit: float = 0.0
    """Intersection over union of the silhouette with its kind's shape, 0 to 1."""

    def shows(self, scene: Scene) -> bool:
        """Whether the shape's colour and kind are the scene's."""
        return self.colour == scene.colour and self.kind == scene.kind


@dataclass(frozen=True)
class Score:
    """Fractions (0 to 1) of a set of cases that match."""

    cases: int
    colour: float
    kind: float
    background: float
    size: float
    position: float
    colour_and_kind: float
    stripes: float
    outline: float

    def __str__(self) -> str:
        parts = [f"{name} {share:.1%}" for name, share in vars(self).items() if name != "cases"]
        return f"{self.cases} cases: " + ", ".join(parts)


def read(image: Image.Image) -> Reading:
    """Read an RGB image of any size (scaled to PIXELS x PIXELS)."""
    rgb = image.convert("RGB")
    if rgb.size != (PIXELS, PIXELS):
        rgb = rgb.resize((PIXELS, PIXELS), Image.Resampling.BOX)
    pixels = np.asarray(rgb, np.float32)
    names = nearest_colour(pixels)

    border = np.ones((PIXELS, PIXELS), bool)
    border[4:-4, 4:-4] = False
    ground, share = _most_common(names[border], len(BACKGROUNDS))
    if share < BORDER_SHARE:
        return Reading()
    background = _NAMES[ground]
    ground_colour = np.median(pixels[border & (names == ground)], axis=0)
    silhouette = np.linalg.norm(pixels - ground_colour, axis=2) > CONTRAST
    if silhouette.sum() < 100:
        return Reading(background=background)

    kind, radius, x, y, fit = fit_shape(silhouette)
    if fit < FIT:
        return Reading(background=background, fit=fit)
    edge = distance(kind, radius, x, y)
    outline = has_outline(names, edge)
    colour, stripes = fill_of(pixels, edge < -(OUTLINE_WIDTH + 1.0 if outline else 2.0))
    size = min(SIZES, key=lambda name: abs(SIZES[name] - radius))
    position = min(POSITIONS, key=lambda name: np.hypot(*(np.array(POSITIONS[name]) * REACH[size] - (x, y))))
    return Reading(colour, kind, background, size, position, stripes, outline, fit)


def nearest_colour(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the index of each pixel's palette colour, [PIXELS, PIXELS]; -1 if none is near."""
    away = np.linalg.norm(pixels[:, :, None, :] - _PALETTE, axis=3)
    return np.where(away.min(axis=2) <= COLOUR_REACH, away.argmin(axis=2), -1)


def fit_shape(silhouette: Mask) -> tuple[str, float, float, float, float]:
    """Return the kind that fits the silhouette best: (kind, radius, x, y, intersection over union), lengths in
    pixels."""
    rows, columns = np.nonzero(silhouette)
    radius = float(np.sqrt(len(rows) / np.pi))
    centre = (PIXELS - 1) / 2
    x, y = float(columns.mean() - centre), float(rows.mean() - centre)
    fits = {}
    for kind in KINDS:
        shape = distance(kind, radius, x, y) < 0
        fits[kind] = float((shape & silhouette).sum() / (shape | silhouette).sum())
    best = max(fits, key=lambda kind: fits[kind])
    return best, radius, x, y, fits[best]


def fill_of(pixels: NDArray[np.float32], inside: Mask) -> tuple[str | None, bool]:
    """Return the fill colour of the pixels inside, and whether white stripes cross them.

    Each row of the stripe period has its pixels' median colour. The row farthest from white has the fill colour; there
    are stripes if another row is much nearer to white and most pixels half a period apart differ. In a plain shape, all
    rows are alike.
    """
    rows = [pixels[phase::STRIPE_PERIOD][inside[phase::STRIPE_PERIOD]] for phase in range(STRIPE_PERIOD)]
    medians = np.array([np.median(row, axis=0) for row in rows if len(row) >= 4])
    if len(medians) < STRIPE_PERIOD // 2:
        return None, False
    from_white = np.linalg.norm(medians - np.array(WHITE, np.float32), axis=1)
    fill = medians[from_white.argmax()]
    away = np.linalg.norm(_PALETTE - fill, axis=1)
    nearest = _NAMES[int(away.argmin())]
    colour = nearest if nearest in COLOURS and away.min() <= COLOUR_REACH else None
    whiteness = np.linalg.norm(pixels - np.array(WHITE, np.float32), axis=2)
    half = STRIPE_PERIOD // 2
    pairs = inside[:-half] & inside[half:]
    differ = np.abs(whiteness[:-half] - whiteness[half:])[pairs] > 0.3 * from_white.max()
    alternating = differ.size > 0 and differ.mean() >= 0.6
    return colour, bool(alternating and from_white.min() < STRIPE_CONTRAST * from_white.max())


def has_outline(names: NDArray[np.int64], edge: NDArray[np.float32]) -> bool:
    """Whether the band just inside the shape's edge is black."""
    band = (edge < -0.5) & (edge > -3.5)
    return bool((names[band] == _BLACK).mean() >= 0.5) if band.any() else False


def _most_common(names: NDArray[np.int64], count: int) -> tuple[int, float]:
    """Return the most common of the first `count` palette colours, and its fraction of all given pixels."""
    if names.size == 0:
        return 0, 0.0
    counts = np.bincount(names[(names >= 0) & (names < count)], minlength=count)
    return int(counts.argmax()), float(counts.max() / names.size)


def tally(cases: Sequence[ScenePrompt], images: Sequence[Image.Image]) -> Score:
    """Score how often the images show what their cases request. Raises ValueError if their numbers differ."""
    readings = [(case.scene, read(image)) for case, image in zip(cases, images, strict=True)]

    def share(hits: list[bool]) -> float:
        return sum(hits) / len(hits) if hits else 0.0

    words = {
        word: share([getattr(reading, word) == getattr(scene, word) for scene, reading in readings])
        for word in ("colour", "kind", "background", "size", "position")
    }
    return Score(
        cases=len(readings),
        **words,
        colour_and_kind=share([reading.shows(scene) for scene, reading in readings]),
        stripes=share([reading.stripes for _, reading in readings]),
        outline=share([reading.outline for _, reading in readings]),
    )
