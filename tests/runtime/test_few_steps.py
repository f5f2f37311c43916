"""Models that draw in few steps draw what diffusers' own pipelines draw with them (fp32 on the CPU, small): SD-Turbo, SDXL-Turbo
and latent consistency models, each by its own scheduler, with its own defaults.

diffusers is given the image to start from as latents: what it encodes itself is a sample, not the mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, SIZE, TOLERANCE, assert_equal, generator, of_diffusers, put_together
from converted import Converted
from sampled import sampled

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.defaults import Defaults, few_step_defaults, settled
from sdflow.families.shared.noising import DIFFUSION
from sdflow.manifest import Origin
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.files.folder import folder_defaults, read_index
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint, PlainDigests, few_steps, load_pipeline, open_checkpoint

TURBO = {"steps": 4, "guidance_scale": 0.0}  # what its configs say; its name says that one is enough
LCM = {"steps": 4, "guidance_scale": 8.0}
MODELS = {
    "sd-turbo-tiny": ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", TURBO),
    "sdxl-turbo-tiny": ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", TURBO),
    "lcm-sdxl-tiny": ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", LCM),
    "lcm-tiny": ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline", LCM),
}
OF_XL = [name for name, (text, *_) in MODELS.items() if "XL" in text]
"""By default one of each kind, of the smaller family: XL is held to diffusers in tests of its own."""


class Built:
    """A small model: our folder on ONNX Runtime, and diffusers' modules."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
        self.text, self.image, self.own = MODELS[architecture]
        self.folder = root / "pipeline"
        put_together(checkpoint, converted, self.folder)
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        self.parts = load_pipeline(checkpoint).components

    def theirs(self, cls: str) -> Any:
        return of_diffusers(cls, self.parts)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in OF_XL else name for name in MODELS]
)
def built(
    request: pytest.FixtureRequest, converted: Converted, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Built(request.param, tmp_path_factory.mktemp(request.param), converted)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def start(built: Built) -> torch.Tensor:
    """Latents of an image."""
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    pixels = torch.from_numpy(np.stack([rows, columns, 1 - rows])[None] * 2 - 1).float()
    vae = built.parts["vae"]
    with torch.no_grad():
        latents: torch.Tensor = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    return latents


@pytest.mark.parametrize(("steps", "images"), sampled(product([1, None], [1, 2])))
def test_text_to_image_equals_diffusers(built: Built, steps: int | None, images: int) -> None:
    """Without a word about steps and guidance: what the model says itself is what diffusers is told."""
    settings = {"output_type": "np", "height": SIZE, "width": 2 * SIZE, "num_images_per_prompt": images}
    told = {
        "num_inference_steps": built.own["steps"] if steps is None else steps,
        "guidance_scale": built.own["guidance_scale"],
    }
    expected = built.theirs(built.text)(PROMPT, generator=generator(), **settings, **told).images
    drawn = built.ours(PROMPT, generator=generator(), num_inference_steps=steps, **settings).images
    assert_equal(drawn, expected)


def test_the_denoiser_runs_one_row_an_image(built: Built) -> None:
    drawing = built.ours.drawing(PROMPT, height=SIZE, width=SIZE, num_inference_steps=1)
    assert {name: values.shape[0] for name, values in drawing.inputs.conditions.items()} == dict.fromkeys(
        drawing.inputs.conditions, 1
    )


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_image_to_image_equals_diffusers(built: Built, start: torch.Tensor, strength: float) -> None:
    settings = {"strength": strength, "output_type": "np", "num_inference_steps": 4}
    told = {"guidance_scale": built.own["guidance_scale"]}
    expected = built.theirs(built.image)(PROMPT, image=start, generator=generator(), **settings, **told).images
    assert_equal(built.ours(PROMPT, start, generator=generator(), **settings).images, expected)


def test_guidance_is_an_input_of_a_latent_consistency_model(built: Built) -> None:
    if built.own is not LCM:
        assert "timestep_cond" not in built.ours.submodels["unet"].input_types
        pytest.skip("for latent consistency models")
    settings = {"output_type": "np", "height": SIZE, "width": SIZE, "num_inference_steps": 2}
    drawn = {}
    for scale in (1.0, 3.0, 12.5):
        expected = built.theirs(built.text)(PROMPT, generator=generator(), guidance_scale=scale, **settings).images
        drawn[scale] = built.ours(PROMPT, generator=generator(), guidance_scale=scale, **settings).images
        assert_equal(drawn[scale], expected)
    assert np.abs(drawn[3.0] - drawn[12.5]).max() > 10 * TOLERANCE, "guidance changes nothing"
    with pytest.raises(UsageError, match="no negative prompt"):
        built.ours(PROMPT, negative_prompt="grey", **settings)


@pytest.mark.once("built")
@pytest.mark.parametrize("scheduler", ["lcm", "tcd", "ddim_trailing", "euler_trailing"])
def test_with_the_schedulers_of_few_step_loras_the_image_equals_diffusers(built: Built, scheduler: str) -> None:
    if built.own is LCM:
        pytest.skip("its own scheduler alone")
    ours, theirs = built.ours, built.theirs(built.text)
    settings = {"output_type": "np", "height": SIZE, "width": SIZE, "num_inference_steps": 3, "guidance_scale": 0.0}
    own, theirs.scheduler = ours.scheduler, named_scheduler(scheduler, ours.scheduler.config, DIFFUSION)
    ours.scheduler = named_scheduler(scheduler, own.config, DIFFUSION)
    try:
        for eta in (0.0, 1.0) if scheduler == "tcd" else (0.0,):
            expected = theirs(PROMPT, generator=generator(), eta=eta, **settings).images
            assert_equal(ours(PROMPT, generator=generator(), eta=eta, **settings).images, expected)
    finally:
        ours.scheduler = own


def test_the_folder_says_what_diffusers_or_optimum_load_it_as(built: Built) -> None:
    index = read_index(built.folder)
    assert index["_class_name"] == built.ours.family.assembled_as["text"]
    own = folder_defaults(built.folder)["text"]
    assert own == built.ours.defaults["text"]
    assert {"steps": own.steps, "guidance_scale": own.guidance_scale} == built.own


def test_with_the_denoiser_of_a_latent_consistency_model_the_image_is_that_of_diffusers(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], converted: Converted, tmp_path: Path
) -> None:
    """In a model that had another, with LCMScheduler and its steps and guidance: nobody says so."""
    other = "synthetic:lcm-tiny?seed=1"
    opened = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False, components={"unet": other})
    opened = replace(opened, said=few_steps(opened, []))
    parts = {name: tiny_artifacts[name] for name in tiny_artifacts if name != "safety_checker"}
    assemble(
        tmp_path / "pipeline",
        parts={**parts, **converted(opened, ["unet"])},
        companions=opened.companions,
        origin=Origin("other", "cpu", few_steps=opened.said),
        changed=opened.changed_companions(),
    )
    modules = load_pipeline(tiny_checkpoint).components
    unet = load_pipeline(open_checkpoint(other, digests=PlainDigests(), download=False)).unet
    scheduler = diffusers.LCMScheduler.from_config(modules["scheduler"].config)
    theirs = diffusers.StableDiffusionPipeline(
        **{**modules, "unet": unet, "scheduler": scheduler, "safety_checker": None}, requires_safety_checker=False
    )
    settings = {"output_type": "np", "height": SIZE, "width": SIZE}
    expected = theirs(PROMPT, generator=generator(), num_inference_steps=4, guidance_scale=8.0, **settings).images
    ours = Pipeline.load(tmp_path / "pipeline", "cpu", threads=1)
    assert_equal(ours(PROMPT, generator=generator(), **settings).images, expected)
    with pytest.raises(UsageError, match="no negative prompt"):
        ours(PROMPT, negative_prompt="grey", **settings)


# Defaults

PIPELINES: Mapping[str, Mapping[str, str]] = {
    "stable_diffusion": {
        "text": "StableDiffusionPipeline",
        "image": "StableDiffusionImg2ImgPipeline",
        "inpaint": "StableDiffusionInpaintPipeline",
    },
    "stable_diffusion_xl": {
        "text": "StableDiffusionXLPipeline",
        "image": "StableDiffusionXLImg2ImgPipeline",
        "inpaint": "StableDiffusionXLInpaintPipeline",
    },
    "latent_consistency": {
        "text": "LatentConsistencyModelPipeline",
        "image": "LatentConsistencyModelImg2ImgPipeline",
    },
}


OF_CARDS: Mapping[str, Mapping[str, Any]] = {"latent_consistency": {"guidance_scale": 8.0}}
"""What the models' cards say otherwise."""


@pytest.mark.parametrize(("family", "task"), [(family, task) for family in PIPELINES for task in PIPELINES[family]])
def test_a_familys_defaults_are_those_of_diffusers_signatures(family: str, task: Any) -> None:
    signature = inspect.signature(getattr(diffusers, PIPELINES[family][task]).__call__).parameters
    own = FAMILIES[family].defaults[task]
    said = {"steps": signature["num_inference_steps"].default, "guidance_scale": signature["guidance_scale"].default}
    assert {"steps": own.steps, "guidance_scale": own.guidance_scale} == said | OF_CARDS.get(family, {})
    assert own.strength == (signature["strength"].default if "strength" in signature else 1.0)
    assert own.eta == (signature["eta"].default if "eta" in signature else 0.0)


@pytest.mark.parametrize(
    ("steps", "strength", "expected"),
    [(50, 0.8, 50), (1, 0.8, 2), (1, 0.5, 2), (4, 0.3, 4), (1, 0.3, 4), (4, 0.1, 10), (1, 1 / 49, 50), (1, 1.0, 1)],
)
def test_few_steps_leave_at_least_one_whatever_the_strength(steps: int, strength: float, expected: int) -> None:
    found = Defaults(steps, 0.0).steps_at(strength)
    assert found == expected
    assert int(found * strength) >= 1


def test_what_is_said_of_the_strength_takes_no_steps_from_text() -> None:
    """SD-Turbo draws from text in one step, and from an image at half the strength in two."""
    said = {"steps": 1, "guidance_scale": 0.0, "strength": 0.5}
    found = settled(FAMILIES["stable_diffusion"].defaults, {}, {}, said)
    steps = {task: each.steps_at(each.strength) for task, each in found.items()}
    assert steps == {"text": 1, "image": 2, "inpaint": 2}


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        ({"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}, TURBO),
        ({"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}, TURBO),
        ({"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"}, {}),
        ({"_class_name": "DDIMScheduler", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}, {}),
        (
            {
                "_class_name": "EulerDiscreteScheduler",
                "timestep_spacing": "trailing",
                "prediction_type": "v_prediction",
            },
            {},
        ),
        ({"_class_name": "LCMScheduler"}, {"steps": 4, "guidance_scale": 1.0}),
        ({"_class_name": "TCDScheduler"}, {"steps": 4, "guidance_scale": 0.0, "eta": 0.3}),
        ({"_class_name": "PNDMScheduler"}, {}),
    ],
)
def test_what_a_scheduler_tells_of_the_model(scheduler: dict[str, Any], told: dict[str, Any]) -> None:
    assert few_step_defaults({}, scheduler) == told
