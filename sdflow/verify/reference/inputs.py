"""Inputs on which submodels are compared, besides those recorded while the image is generated.

They are made from the ports alone: inputs with the latents' axes are random, others repeat recorded values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sdflow.families.shared.latents import Latents
from sdflow.models.ports import Port, Ports
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.selection import Selection

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SCALE = 0.6
"""Scale of each IP-Adapter."""

Recorded = Mapping[str, Mapping[str, "np.ndarray"]]
"""Submodel -> its inputs, in one run of diffusers."""


def latent_port(ports: Ports) -> Port:
    """The input for latents."""
    return next(port for port in ports.inputs if "latent_height" in port.axes)


def first_latents(selection: Selection, channels: int) -> np.ndarray:
    """The standard normal latents (1, channels, rows, columns) from which every engine starts the image."""
    shape = (1, channels, selection.rows, selection.columns)
    return np.random.default_rng(selection.seed).standard_normal(shape, dtype=np.float32)


def control_images(selection: Selection, nets: int, scale: int) -> list[np.ndarray]:
    """Control images of the ControlNets, (1, 3, height, width) in [0, 1] each: black and white squares. scale: pixels
    per latent."""
    random = np.random.default_rng(selection.seed + 4)
    squares = random.integers(0, 2, (nets, 1, 1, selection.rows, selection.columns)).astype(np.float32)
    return list(squares.repeat(3, 2).repeat(scale, 3).repeat(scale, 4))


def shown_images(selection: Selection, adapters: int) -> list[Image]:
    """Image prompts, one per IP-Adapter: colored squares, at a size that every image processor has to change."""
    from PIL.Image import fromarray

    random = np.random.default_rng(selection.seed + 5)
    squares = random.integers(0, 256, (adapters, 6, 9, 3)).astype(np.uint8)
    return [fromarray(each.repeat(16, 0).repeat(16, 1)) for each in squares]


def prompter_cases(selection: Selection, pixels: Sequence[np.ndarray], prompter: Network) -> Cases:
    """Cases: each image prompt, (1, 3, size, size) as the processor makes it; none; noise and none as one batch."""
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
    """Add cases with edge timesteps, at the first latents for the largest and at the last for the others, and other
    shapes.

    Also for ControlNets, which take the denoiser's inputs and an image.
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
    pixels = images[0] // selection.rows if images else 0  # per latent
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
            elif value.ndim == 4:  # outputs of ControlNets: values of the recorded size
                inputs[name] = random.standard_normal(ports[name].shape(sizes), dtype=np.float32) * value.std()
            elif name == time:
                inputs[name] = np.array([501], np.float32)
            else:
                inputs[name] = np.concatenate([value[index % len(value)][None] for index in range(batch)])
        cases.add(Case(f"shape {batch}x{rows}x{columns}", "shape", None, 501), inputs)


def text_cases(encode: Callable[[Sequence[str]], Recorded], selection: Selection) -> dict[str, Cases]:
    """Submodel -> cases: each prompt alone, and the first with an empty one as a batch. encode: diffusers' prompt
    encoding."""
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
    """Latents from the trajectory's middle and end, scaled as the pipeline does, and random ones of other shapes."""
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
    """The generated image, (1, height, width, 3) in [0, 1], and noise of other shapes."""
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
    """diffusers' inputs of the checker for the image, and a batch of 2, whose second row is noise for fixed-size
    inputs."""
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
