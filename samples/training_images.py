"""The images that the sample is trained on, drawn here."""

import random
from multiprocessing import Pool

import numpy as np
import torch
from torch import Tensor

from sdflow.samples.scene import Scene, Style, all_scenes, draw, is_held_out


def training_scenes(count: int, seed: int) -> list[Scene]:
    """Scenes drawn evenly from the combinations that are not held out."""
    allowed = [scene for scene in all_scenes() if not is_held_out(scene)]
    return random.Random(seed).choices(allowed, k=count)


def _draw(job: tuple[Scene, int, Style]) -> np.ndarray:
    return draw(*job)


def images(scenes: list[Scene], style: Style, seed: int, device: torch.device) -> Tensor:
    """uint8 images [count, 3, 128, 128] on the device, in channels-last order."""
    with Pool() as pool:
        drawn = pool.map(_draw, [(scene, seed + i, style) for i, scene in enumerate(scenes)], chunksize=256)
    return torch.from_numpy(np.stack(drawn)).to(device).permute(0, 3, 1, 2)


def as_input(image: Tensor) -> Tensor:
    """uint8 images to floats in [-1, 1]."""
    return image.float() / 127.5 - 1.0
