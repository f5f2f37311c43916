"""Images of the sample pipeline: one coloured shape on a coloured background, drawn with numpy.

A scene has five words (colour, kind, background, size, position); a seed moves and scales it slightly. The two sample
LoRAs teach the styles `stripes` (white stripes across the shape) and `outline` (a black border just inside its edge),
which are the only uses of white and black.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

PIXELS = 128

Pixels = NDArray[np.uint8]  # [PIXELS, PIXELS, 3], RGB
Plane = NDArray[np.float32]  # [PIXELS, PIXELS]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 45),
    "orange": (245, 135, 25),
    "yellow": (250, 220, 60),
    "green": (40, 160, 70),
    "blue": (40, 85, 215),
    "purple": (130, 50, 170),
    "pink": (245, 140, 190),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {**COLOURS, "gray": (145, 145, 145)}
WHITE = (255, 255, 255)
BLACK = (15, 15, 15)

SIZES: dict[str, float] = {"small": 17.0, "medium": 26.0, "large": 37.0}
"""Size class -> radius in pixels of the disc with the shape's area."""

REACH: dict[str, float] = {"small": 32.0, "medium": 24.0, "large": 13.0}
"""Size class -> distance in pixels of an off-centre shape from the image's centre."""

POSITIONS: dict[str, tuple[int, int]] = {
    "middle": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
}

STRIPE_PERIOD = 8  # pixels: one latent cell, so every cell inside the shape has the same pattern
OUTLINE_WIDTH = 4.0  # pixels


@dataclass(frozen=True)
class Scene:
    """The words of an image: keys of COLOURS, KINDS, BACKGROUNDS, SIZES and POSITIONS."""

    colour: str
    kind: str
    background: str
    size: str
    position: str


@dataclass(frozen=True)
class Style:
    """Decorations of a plain scene."""

    stripes: bool = False
    outline: bool = False


PLAIN = Style()


# Each kind maps x (right) and y (up), in units of the radius from the centroid, to the approximate distance to the edge
# in the same units, negative inside. Every kind has the area of the unit disc.
def _circle(x: Plane, y: Plane) -> Plane:
    edge: Plane = np.hypot(x, y) - np.float32(1.0)
    return edge


def _square(x: Plane, y: Plane) -> Plane:
    edge: Plane = np.maximum(np.abs(x), np.abs(y)) - np.float32(np.sqrt(np.pi) / 2)
    return edge


def _diamond(x: Plane, y: Plane) -> Plane:
    edge: Plane = (np.abs(x) + np.abs(y)) * np.float32(np.sqrt(0.5)) - np.float32(np.sqrt(np.pi) / 2)
    return edge


def _triangle(x: Plane, y: Plane) -> Plane:
    inradius = np.sqrt(np.pi / (3 * np.sqrt(3)))
    edge: Plane = np.maximum(-y, np.abs(x) * np.float32(np.sqrt(0.75)) + y * np.float32(0.5)) - np.float32(inradius)
    return edge


def _cross(x: Plane, y: Plane) -> Plane:
    arm = np.sqrt(np.pi / 20)  # half an arm's width; the cross is five squares of this half-width
    a, b = np.abs(x), np.abs(y)
    upright = np.maximum(a - np.float32(arm), b - np.float32(3 * arm))
    level = np.maximum(a - np.float32(3 * arm), b - np.float32(arm))
    edge: Plane = np.minimum(upright, level)
    return edge


def _star(x: Plane, y: Plane) -> Plane:
    inner_ratio = 0.45
    tip = np.sqrt(np.pi / (5 * inner_ratio * np.sin(np.pi / 5)))
    # Fold the plane into one half of one point of the star; its edge is a single line from the tip to the inner corner.
    angle = np.abs(np.mod(np.arctan2(x, y) + np.pi / 5, 2 * np.pi / 5) - np.pi / 5)
    radius = np.hypot(x, y)
    corner = tip * inner_ratio * np.array([np.cos(np.pi / 5), np.sin(np.pi / 5)])
    edge = corner - np.array([tip, 0.0])
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    signed = (radius * np.cos(angle) - tip) * normal[0] + radius * np.sin(angle) * normal[1]
    return np.asarray(signed, np.float32)


def _heart(x: Plane, y: Plane) -> Plane:
    # Inigo Quilez, "2D distance functions", sdHeart: a square on its corner and two half discs; area 1/2 + pi/8.
    scale = np.sqrt(np.pi / (0.5 + np.pi / 8))
    centroid = (0.25 + np.pi / 8 * (0.75 + 1 / (3 * np.pi))) / (0.5 + np.pi / 8)
    a, b = np.abs(x) / scale, y / scale + centroid
    lobe = np.hypot(a - 0.25, b - 0.75) - np.sqrt(0.125)
    along = 0.5 * np.maximum(a + b, 0.0)
    side = np.sqrt(np.minimum(a * a + (b - 1.0) ** 2, (a - along) ** 2 + (b - along) ** 2)) * np.sign(a - b)
    return np.asarray(np.where(a + b > 1.0, lobe, side) * scale, np.float32)


KINDS: dict[str, Callable[[Plane, Plane], Plane]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "star": _star,
    "cross": _cross,
    "heart": _heart,
}

_GRID = np.arange(PIXELS, dtype=np.float32) - np.float32((PIXELS - 1) / 2)


def distance(kind: str, radius: float, x: float, y: float) -> Plane:
    """Signed distance in pixels to the edge of a shape, negative inside.

    `radius` is that of the disc of equal area; (x, y) is the centroid, in pixels to the right of and below the centre.
    """
    across = np.broadcast_to((_GRID - np.float32(x)) / np.float32(radius), (PIXELS, PIXELS))
    up = np.broadcast_to(((np.float32(y) - _GRID) / np.float32(radius))[:, None], (PIXELS, PIXELS))
    return KINDS[kind](across, up) * np.float32(radius)


def draw(scene: Scene, seed: int, style: Style = PLAIN) -> Pixels:
    """Draw a scene; equal arguments give equal pixels, and other seeds move and scale the shape slightly."""
    jitter = np.random.default_rng(seed).uniform(-1.0, 1.0, 3)
    radius = SIZES[scene.size] + 1.5 * jitter[0]
    right, down = POSITIONS[scene.position]
    reach = REACH[scene.size]
    edge = distance(scene.kind, radius, right * reach + 2.0 * jitter[1], down * reach + 2.0 * jitter[2])

    fill = np.broadcast_to(np.array(COLOURS[scene.colour], np.float32), (PIXELS, PIXELS, 3))
    if style.stripes:
        white = (np.arange(PIXELS) % STRIPE_PERIOD < STRIPE_PERIOD // 2)[:, None, None]
        fill = np.where(white, np.array(WHITE, np.float32), fill)
    if style.outline:
        fill = _over(fill, np.array(BLACK, np.float32), np.clip(0.5 + edge + np.float32(OUTLINE_WIDTH), 0.0, 1.0))
    ground = np.broadcast_to(np.array(BACKGROUNDS[scene.background], np.float32), (PIXELS, PIXELS, 3))
    image = _over(ground, fill, np.clip(0.5 - edge, 0.0, 1.0))
    return np.rint(image).astype(np.uint8)


def _over(below: NDArray[np.float32], above: NDArray[np.float32], cover: Plane) -> NDArray[np.float32]:
    return below + (above - below) * cover[:, :, None]


HELD_OUT_PAIRS = frozenset({("red", "heart"), ("green", "star"), ("blue", "triangle"), ("pink", "cross")})
"""Pairs of colour and kind excluded from training on all backgrounds."""


def all_scenes() -> list[Scene]:
    """Return all scenes in a fixed order; a shape never has the background's colour."""
    return [Scene(*words) for words in product(COLOURS, KINDS, BACKGROUNDS, SIZES, POSITIONS) if words[0] != words[2]]


def is_held_out(scene: Scene) -> bool:
    """Whether the scene is excluded from training: four pairs of colour and kind, every eleventh combination with
    background."""
    if (scene.colour, scene.kind) in HELD_OUT_PAIRS:
        return True
    words = (
        list(COLOURS).index(scene.colour),
        list(KINDS).index(scene.kind),
        list(BACKGROUNDS).index(scene.background),
    )
    return (words[0] + 3 * words[1] + 5 * words[2]) % 11 == 0
