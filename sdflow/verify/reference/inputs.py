"""The inputs that submodels are compared on, beside those recorded while an image is drawn.

They are made from the ports alone: what has the latents' axes is drawn at random, what does not is repeated from what was
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sdflow.families.shared.latents import Latents
from sdflow.models.base import Port, Ports
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.selection import Selection

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SCALE = 0.6
"""How much each IP-Adapter counts."""

Recorded = Mapping[str, Mapping[str, "np.ndarray"]]
"""Submodel -> its inputs, in one run of diffusers' own."""


def latent_port(ports: Ports) -> Port:
    """The input that latents go into."""
    return next(port for port in ports.inputs if "latent_height" in port.axes)


def first_latents(selection: Selection, channels: int) -> np.ndarray:
    """Unit normal latents (1, channels, rows, columns) that every engine starts the image from."""
    shape = (1, channels, selection.rows, selection.columns)
    return np.random.default_rng(selection.seed).standard_normal(shape, dtype=np.float32)


def control_images(selection: Selection, nets: int, scale: int) -> list[np.ndarray]:
    """What ControlNets are told, (1, 3, height, width) in [0, 1] for each: black and white squares. scale: pixels per latent."""
    random = np.random.default_rng(selection.seed + 4)
    squares = random.integers(0, 2, (nets, 1, 1, selection.rows, selection.columns)).astype(np.float32)
    return list(squares.repeat(3, 2).repeat(scale, 3).repeat(scale, 4))


def shown_images(selection: Selection, adapters: int) -> list[Image]:
    """What IP-Adapters are shown, one image for each: colored squares, of no size that an image processor leaves as it is."""
    from PIL.Image import fromarray

    random = np.random.default_rng(selection.seed + 5)
    squares = random.integers(0, 256, (adapters, 6, 9, 3)).astype(np.uint8)
    return [fromarray(each.repeat(16, 0).repeat(16, 1)) for each in squares]


def prompter_cases(selection: Selection, pixels: Sequence[np.ndarray], prompter: Network) -> Cases:
    """Each image that is shown, (1, 3, size, size) as the processor makes it; none; noise and none as one batch."""
    cases = Cases()
    read, shown = (port.name for port in prompter.ports.inputs)
    one, none = np.ones(1, np.float32), np.zeros(1, np.float32)
    for index, each in enumerate(pixels):
        cases.add(Case(f"image {index + 1}", "prompt"), {read: each, shown: one})
    cases.add(Case("no image", "edge"), {read: pixels[0], shown: none})
    noise = np.random.default_rng(selection.seed + 6).standard_normal(pixels[0].shape, dtype=np.float32)
    both = {read: np.concatenate([noise, pixels[0]]), shown: np.concatenate([one, none])}
    cases.add(Case("a batch of 2", "shape"), both)
    return cases


def further_denoiser_cases(cases: Cases, selection: Selection, network: Network) -> None:
    """Edge timesteps, at the first latents for the largest and at the last for the others; other shapes.

    Also of a ControlNet, which takes what the denoiser takes, and an image.
    """
    first, last = cases.get(0, "inputs"), cases.get(len(cases.cases) - 1, "inputs")
    time = network.whole_batch
    assert time is not None
    for timestep in selection.timesteps:
        near = first if timestep > 500 else last
        one = {name: value[-1:] for name, value in near.items()} | {time: np.array([timestep], np.float32)}
        cases.add(Case(f"timestep {timestep:g}", "edge timestep", None, timestep), one)
    random = np.random.default_rng(selection.seed + 1)
    latents = latent_port(network.ports)
    ports = {port.name: port for port in network.ports.inputs}
    images = [value.shape[2] for name, value in first.items() if "height" in ports[name].axes]
    pixels = images[0] // selection.rows if images else 0  # for each latent
    for batch, rows, columns in selection.shapes:
        inputs = {}
        sizes = {"batch": batch, "latent_height": rows, "latent_width": columns}
        sizes |= {"height": rows * pixels, "width": columns * pixels}
        for name, value in first.items():
            if name == latents.name:
                inputs[name] = random.standard_normal((batch, value.shape[1], rows, columns), dtype=np.float32)
            elif "height" in ports[name].axes:  # an image in [0, 1]
                inputs[name] = random.random(ports[name].shape(sizes), dtype=np.float32)
            elif name in network.constants:
                inputs[name] = value
            elif value.ndim == 4:  # what ControlNets give: values as large as those recorded
                inputs[name] = random.standard_normal(ports[name].shape(sizes), dtype=np.float32) * value.std()
            elif name == time:
                inputs[name] = np.array([501], np.float32)
            else:
                inputs[name] = np.concatenate([value[index % len(value)][None] for index in range(batch)])
        cases.add(Case(f"shape {batch}x{rows}x{columns}", "shape", None, 501), inputs)


def text_cases(encode: Callable[[Sequence[str]], Recorded], selection: Selection) -> dict[str, Cases]:
    """Submodel -> each prompt by itself, and an empty one with the first as one batch. encode: has diffusers encode prompts."""
    found: dict[str, Cases] = {}

    def add(case: Case, prompts: Sequence[str]) -> None:
        for submodel, inputs in encode(prompts).items():
            found.setdefault(submodel, Cases()).add(case, inputs)

    for prompt in selection.prompts:
        shown = prompt if len(prompt) <= 40 else prompt[:37] + "..."
        add(Case(f"prompt {shown!r}", "prompt"), [prompt])
    add(Case("a batch of 2", "shape"), [selection.prompts[0], ""])
    return found


def decoder_cases(
    selection: Selection, denoiser_cases: Cases, denoiser: Network, decoder: Network, latents: Latents
) -> Cases:
    """Latents of the trajectory's middle and end, scaled as the pipeline scales them, and normal ones of other shapes."""
    cases = Cases()
    latents_input, port = latent_port(denoiser.ports).name, latent_port(decoder.ports)
    trajectory = [index for index, case in denoiser_cases if case.group == "trajectory"]
    for index in (trajectory[len(trajectory) // 2], trajectory[-1]):
        drawn = latents.to_vae(denoiser_cases.get(index, "inputs")[latents_input][-1:, : latents.channels])
        step = denoiser_cases.cases[index].step
        cases.add(Case(f"latents of step {step + 1 if step is not None else 0}", "trajectory"), {port.name: drawn})
    random = np.random.default_rng(selection.seed + 2)
    for batch, rows, columns in selection.vae_shapes:
        noise = random.standard_normal((batch, latents.channels, rows, columns), dtype=np.float32)
        cases.add(Case(f"shape {batch}x{rows}x{columns}", "shape"), {port.name: noise})
    return cases


def encoder_cases(selection: Selection, image: np.ndarray, encoder: Network) -> Cases:
    """The image that was drawn, (1, height, width, 3) in [0, 1], and noise of other shapes."""
    cases = Cases()
    (port,) = encoder.ports.inputs
    cases.add(Case("the image drawn", "trajectory"), {port.name: 2 * image.transpose(0, 3, 1, 2) - 1})
    random = np.random.default_rng(selection.seed + 3)
    scale = image.shape[1] // selection.rows
    for batch, rows, columns in selection.vae_shapes:
        noise = random.uniform(-1, 1, (batch, 3, rows * scale, columns * scale)).astype(np.float32)
        cases.add(Case(f"noise {batch}x{rows * scale}x{columns * scale}", "shape"), {port.name: noise})
    return cases


def checker_cases(selection: Selection, recorded: Mapping[str, np.ndarray], checker: Network) -> Cases:
    """What diffusers fed the checker for the image, and as a batch of 2: of inputs of one size the second is noise."""
    cases = Cases()
    cases.add(Case("the image drawn", "trajectory"), recorded)
    random = np.random.default_rng(selection.seed + 3)
    sized = {port.name for port in checker.ports.inputs if all(isinstance(axis, int) for axis in port.axes[1:])}
    both = {
        name: np.concatenate([value, random.standard_normal(value.shape, dtype=np.float32)])
        if name in sized
        else np.repeat(value, 2, axis=0)
        for name, value in recorded.items()
    }
    cases.add(Case("the image and noise", "shape"), both)
    return cases
