"""Compare the image that the whole pipeline generates from the same latents, and score the sample's images."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.distance import largest_difference, psnr, ssim
from sdflow.families.shared.base import Family
from sdflow.families.shared.image_prompts import ImagePrompt, adapter_count, image_conditions
from sdflow.families.shared.request import Request, Tensors
from sdflow.models.ports import Ports, Role
from sdflow.models.vae import image_reader
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.files.folder import (
    folder_latents,
    folder_task,
    load_companions,
    onnx_submodels,
    read_options,
    submodel_config,
)
from sdflow.samples.canvas import canvas
from sdflow.samples.prompts import evaluation_set
from sdflow.tolerances import DECIBELS_ASTRAY, DECIBELS_BEHIND, IMAGE_DECIBELS, SCORE_APART
from sdflow.verify.reference.inputs import IMAGE_SCALE, control_images, shown_images
from sdflow.verify.reference.selection import Selection
from sdflow.verify.reference.torch_images import IMAGE_FILE, SAMPLE_FILE
from sdflow.verify.result import HALVES, PLAIN, ImageVerdict, MeaningVerdict

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Run = Callable[[str, "Mapping[str, np.ndarray]"], "dict[str, np.ndarray]"]
"""Runs a submodel, given its name and inputs by name."""
AMPLIFIED = 10
"""Factor by which the difference image amplifies differences."""


@dataclass(frozen=True)
class Drawn:
    """The image, (rows, columns, 3), and the images of the sample's cases, (cases, rows, columns, 3), in [0, 1]."""

    image: np.ndarray
    sample: np.ndarray | None


def draw(run: Run, family: Family, folder: Path, selection: Selection, reference: Path) -> Drawn:
    """Generate the reference's images with the artifacts. folder: the pipeline's, for its tokenizers and scheduler."""
    with np.load(reference / IMAGE_FILE) as stored:
        latents = stored["latents"]
    image = text_to_image(run, family, folder, [selection.prompts[0]], latents, selection.steps, selection)
    sample = None
    if selection.sample_cases:
        from sdflow.samples.prompts import evaluation_set, first_latents

        cases = evaluation_set()[: selection.sample_cases]
        starts = np.stack([first_latents(case.seed) for case in cases])
        prompts = [case.prompt for case in cases]
        sample = text_to_image(run, family, folder, prompts, starts, selection.sample_steps, selection)
    return Drawn(image[0], sample)


def text_to_image(
    run: Run,
    family: Family,
    folder: Path,
    prompts: Sequence[str],
    first: np.ndarray,
    steps: int,
    selection: Selection,
    *,
    begin: float | None = None,
    end: float | None = None,
) -> np.ndarray:
    """Images, float32 (images, rows, columns, 3) in [0, 1], from the plain loop of diffusers' pipelines.

    first: the noise. begin, end: diffusers' `denoising_start` and `denoising_end`: with an end, the latents there are
    returned, and with a start, `first` are those.

    One graph is needed at a time: the text encoders, then the denoiser, with its ControlNets, for every step, then the
    decoder.
    """
    import torch

    def run_torch(submodel: str, inputs: Tensors) -> Tensors:
        found = run(submodel, {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def ports(submodel: str) -> Ports:
        return family.part(submodel).ports(submodel_config(folder, submodel))

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        given, made = (ports(family.encoder).of(role) for role in (Role.PIXELS, Role.LATENTS))
        return latents.from_vae(run_torch(family.encoder, {given: pixels})[made].float())

    companions, latents, task = load_companions(folder), folder_latents(folder), folder_task(folder)
    height, width = (latents.scale * size for size in first.shape[2:])
    denoiser = submodel_config(folder, family.denoiser)
    guidance_width = family.guidance_width({family.denoiser: denoiser})
    weight = family.guidance_weight(selection.guidance_scale)
    more = selection.text_arguments
    request = Request(prompts, None, weight, height, width, guidance_width, more, denoiser=denoiser)
    conditions = family.condition(run_torch, companions, read_options(folder), request)

    nets = list(family.nets(onnx_submodels(folder)).values())
    rows = len(prompts) * conditions.halves
    inputs_of_images: Tensors = {}
    if adapters := adapter_count(denoiser):
        shown = [ImagePrompt((image,), IMAGE_SCALE) for image in shown_images(selection, adapters)]
        (prompter,) = family.prompters(onnx_submodels(folder))
        processor, guided = companions["feature_extractor"], conditions.halves == 2
        inputs_of_images = image_conditions(run_torch, prompter, processor, denoiser, shown, rows, guided=guided)
    controls = [
        torch.from_numpy(image).repeat(rows, 1, 1, 1) for image in control_images(selection, len(nets), latents.scale)
    ]

    scheduler = companions["scheduler"]
    noising, names = family.noising, Moving.of(ports(family.denoiser))
    noising.set_timesteps(scheduler, steps, latents.tokens(*first.shape[2:]))
    known = {"eta": 0.0, "generator": torch.Generator().manual_seed(selection.seed)}
    accepted = inspect.signature(scheduler.step).parameters
    step_options = {name: value for name, value in known.items() if name in accepted}
    noise, start = torch.from_numpy(first), canvas(task, height, width)
    sample = noising.first(scheduler, noise) if begin is None else noise
    context = [sample[:, :0]]  # channels of the denoiser's input after the latents
    if task == "inpaint":
        context = _mask_and_masked(encode, start["image"], start["mask_image"])
    elif task == "image" and begin is None:
        pixels = image_reader(1).preprocess(start["image"])
        sample = noising.noised(scheduler, encode(pixels), noise, scheduler.timesteps[:1])
    for timestep in _part(scheduler, begin, end):
        scaled = torch.cat([noising.scaled(scheduler, sample, timestep), *context], dim=1)
        doubled = torch.cat([scaled] * conditions.halves)
        moving = {names.latents: doubled, names.timestep: torch.tensor([timestep.item()])}
        inputs = {**moving, **conditions.inputs, **inputs_of_images}
        given = [
            run_torch(net, {**inputs, ports(net).of(Role.HINT): image})
            for net, image in zip(nets, controls, strict=True)
        ]
        for name in given[0] if given else ():
            inputs[name] = torch.stack([each[name].float() for each in given]).sum(0)
        output = run_torch(family.denoiser, inputs)[ports(family.denoiser).of(Role.PREDICTION)].float()
        if conditions.halves == 2:
            unconditional, conditional = output.chunk(2)
            output = unconditional + weight * (conditional - unconditional)
        sample = scheduler.step(output, timestep, sample, **step_options).prev_sample

    if end is not None:
        reached: np.ndarray = sample.numpy()
        return reached
    read, made = (ports(family.decoder).of(role) for role in (Role.LATENTS, Role.PIXELS))
    decoded = [run_torch(family.decoder, {read: latents.to_vae(one[None])})[made] for one in sample]
    drawn: np.ndarray = np.clip(torch.cat(decoded).float().numpy() / 2 + 0.5, 0, 1)
    return drawn.transpose(0, 2, 3, 1)


def _part(scheduler: Any, begin: float | None, end: float | None) -> list[torch.Tensor]:
    """The timesteps of a part of the steps, as diffusers' pipelines of Stable Diffusion XL count them."""

    def cutoff(place: float) -> int:
        steps: int = scheduler.config.num_train_timesteps
        return round(steps - place * steps)

    found = list(scheduler.timesteps)
    if begin is not None:
        left = sum(1 for timestep in found if timestep < cutoff(begin))
        if scheduler.order == 2 and left % 2 == 0:  # do not split a step of two runs
            left += 1
        found = found[len(found) - left :]
        scheduler.set_begin_index(len(scheduler.timesteps) - len(found))
    return found if end is None else [timestep for timestep in found if timestep >= cutoff(end)]


def _mask_and_masked(
    encode: Callable[[torch.Tensor], torch.Tensor], image: Image, mask_image: Image
) -> list[torch.Tensor]:
    """The inputs of an inpainting denoiser after the latents: the downscaled mask, and the latents of the masked image.

    encode: pixels to latents."""
    import torch

    mask = image_reader(1, do_normalize=False, do_binarize=True, do_convert_grayscale=True).preprocess(mask_image)
    pixels = image_reader(1).preprocess(image) * (mask < 0.5)
    encoded = encode(pixels)
    return [torch.nn.functional.interpolate(mask, size=tuple(encoded.shape[2:])), encoded]


def _to_pil(images: np.ndarray) -> list[Image]:
    from PIL import Image

    return [Image.fromarray(pixels) for pixels in (images * 255).round().astype("uint8")]


def precision_of(precisions: Iterable[str]) -> str:
    """The precision of an image from those of its submodels: a quantized type if there is one, else the coarsest
    type."""
    found = set(precisions)
    coarsest = next((each for each in ("bfloat16", "float16") if each in found), "float32")
    return next(iter(sorted(found - {*PLAIN})), coarsest)


def judge_image(
    image: np.ndarray, selection: Selection, reference: Path, precision: str, out: Path, *, of: str = ""
) -> ImageVerdict:
    """Compare with fp32 PyTorch's image; write both and their difference as PNG files into `out`, with the prefix `of`.

    A quantized pipeline's image only has to be finite; its distance is reported.
    """
    with np.load(reference / IMAGE_FILE) as stored:
        exact, half = stored["float32"], stored["float16"]
    shown = np.nan_to_num(image)
    difference = np.clip(np.abs(shown - exact) * AMPLIFIED, 0, 1)
    names = ("pytorch", "artifact", "difference")
    for name, each in zip(names, _to_pil(np.stack([exact, shown, difference])), strict=True):
        each.save(out / f"{of}{name}.png")
    ours, plain = psnr(image, exact), psnr(half, exact)
    quantized = "" if precision in PLAIN else precision
    enough = -math.inf if quantized else IMAGE_DECIBELS[precision]
    if precision in HALVES and not np.isfinite(half).all():
        enough = DECIBELS_ASTRAY
    elif precision in HALVES:
        enough = min(enough, plain - DECIBELS_BEHIND) if plain >= DECIBELS_ASTRAY else 0.0
    problems: tuple[tuple[str, str], ...] = ()
    if not ours >= enough or not np.isfinite(image).all():
        problems = (
            (
                f"the image's PSNR against PyTorch's from the same latents is {ours:.1f} dB (plain fp16 PyTorch: "
                f"{plain:.1f}); at least {enough:.1f} is required",
                "If every submodel passes, the scheduler or the tokenizer differs from the checkpoint's.",
            ),
        )
    return ImageVerdict(
        psnr=_finite(ours),
        ssim=ssim(image, exact),
        largest_difference=largest_difference(image, exact),
        float16_psnr=_finite(plain),
        float16_ssim=ssim(half, exact),
        float16_largest_difference=largest_difference(half, exact),
        prompt=selection.prompts[0],
        steps=selection.steps,
        height=image.shape[0],
        width=image.shape[1],
        problems=problems,
        quantized=quantized,
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def judge_meaning(sample: np.ndarray | None, selection: Selection, reference: Path) -> MeaningVerdict | None:
    """The sample's own score of these images, compared with that of PyTorch's."""
    if sample is None:
        return None
    from sdflow.samples.score import tally

    cases = evaluation_set()[: selection.sample_cases]
    with np.load(reference / SAMPLE_FILE) as stored:
        exact = tally(cases, _to_pil(stored["float32"])).colour_and_kind
    ours = tally(cases, _to_pil(sample)).colour_and_kind
    problems: tuple[tuple[str, str], ...] = ()
    if abs(ours - exact) > SCORE_APART:
        problems = (
            (
                f"{ours:.0%} of {len(cases)} images match their prompts, but {exact:.0%} of PyTorch's do",
                "Look at the submodels' distances and at the image.",
            ),
        )
    return MeaningVerdict(len(cases), exact, ours, problems)
