"""Text to image, image to image and inpainting draw what diffusers' pipelines draw, with every scheduler by its name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from named_schedulers import SAMPLERS
from PIL import Image

from sdflow.errors import UsageError, VerificationError
from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.denoiser.schedule import named_scheduler, trace
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.session import LoadOptions, create_session
from sdflow.runtime.sessions.submodel import KEPT, Submodel
from sdflow.targets import TARGETS

TOLERANCE = 1e-4  # of pixel values in [0, 1], fp32 on the CPU
SIZE = 64
PROMPT = "a horse"
SETTINGS: dict[str, Any] = {"num_inference_steps": 5, "negative_prompt": "blurry", "output_type": "np"}


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> Iterator[Pipeline]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def parts(tiny_torch: Any) -> dict[str, Any]:
    return {**tiny_torch.components, "safety_checker": None, "requires_safety_checker": False}


@pytest.fixture(scope="module")
def image() -> Image.Image:
    """A slope in each colour."""
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    return Image.fromarray((np.stack([rows, columns, 1 - rows], axis=-1) * 255).astype("uint8"))


@pytest.fixture(scope="module")
def image_latents(tiny_torch: Any, image: Image.Image) -> torch.Tensor:
    """What diffusers encodes the image to, without the noise that it would draw for that."""
    pixels = torch.from_numpy(np.asarray(image) / 127.5 - 1).float().permute(2, 0, 1)[None]
    with torch.no_grad():
        encoded = tiny_torch.vae.encode(pixels).latent_dist.mode()
    return encoded * tiny_torch.vae.config.scaling_factor


@pytest.fixture(scope="module")
def mask() -> Image.Image:
    """White, that is to be drawn, in the right half."""
    return Image.fromarray(np.where(np.arange(SIZE) >= SIZE // 2, 255, 0)[None].repeat(SIZE, 0).astype("uint8"))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def reference(kind: Any, parts: dict[str, Any], scheduler: Any) -> Any:
    made = kind(**{**parts, "scheduler": scheduler})
    made.set_progress_bar_config(disable=True)
    return made


def assert_equal_images(drawn: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    difference = np.abs(drawn - expected).max()
    assert difference <= TOLERANCE, f"largest difference {difference}"


@pytest.fixture(params=SAMPLERS)
def scheduler(request: pytest.FixtureRequest, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each scheduler; `pipeline` has it as long as the test runs."""
    made = named_scheduler(request.param, pipeline.scheduler.config, DIFFUSION)
    monkeypatch.setattr(pipeline, "scheduler", made)
    return made


def test_text_to_image_with_each_scheduler(pipeline: Pipeline, parts: dict[str, Any], scheduler: Any) -> None:
    theirs = reference(diffusers.StableDiffusionPipeline, parts, scheduler)
    settings = {**SETTINGS, "height": SIZE, "width": SIZE}
    expected = theirs(PROMPT, generator=generator(), **settings).images
    assert_equal_images(pipeline(PROMPT, generator=generator(), **settings).images, expected)


def _slow(param: Any, slow: bool, *more: Any) -> Any:
    return pytest.param(*param.values, *more, marks=[*param.marks, *([pytest.mark.slow] if slow else [])])


FROM_IMAGE = [_slow(each, bool(index % 2)) for index, each in enumerate(SAMPLERS)]
INPAINTING = [
    _slow(each, index % 4 != 1 + 2 * other, strength)
    for index, each in enumerate(SAMPLERS)
    for other, strength in enumerate((1.0, 0.6))
]
"""By default one of two schedulers starts from an image, and the other inpaints, at one of two strengths in turn: what they do to
the factors is held to a dense trace for every scheduler (`test_schedule.py`)."""


@pytest.mark.parametrize("scheduler", FROM_IMAGE, indirect=True)
def test_image_to_image_with_each_scheduler(
    pipeline: Pipeline, parts: dict[str, Any], scheduler: Any, image: Image.Image, image_latents: torch.Tensor
) -> None:
    theirs = reference(diffusers.StableDiffusionImg2ImgPipeline, parts, scheduler)
    settings = {**SETTINGS, "strength": 0.6}
    expected = theirs(PROMPT, image=image_latents, generator=generator(), **settings).images
    assert_equal_images(pipeline(PROMPT, image, generator=generator(), **settings).images, expected)


@pytest.mark.parametrize(("scheduler", "strength"), INPAINTING, indirect=["scheduler"])
def test_inpainting_with_each_scheduler(
    pipeline: Pipeline,
    parts: dict[str, Any],
    scheduler: Any,
    image: Image.Image,
    image_latents: torch.Tensor,
    mask: Image.Image,
    strength: float,
) -> None:
    theirs = reference(diffusers.StableDiffusionInpaintPipeline, parts, scheduler)
    settings = {**SETTINGS, "strength": strength, "height": SIZE, "width": SIZE}
    given = {"image": image_latents, "masked_image_latents": image_latents, "mask_image": mask}
    expected = theirs(PROMPT, **given, generator=generator(), **settings).images
    assert_equal_images(pipeline(PROMPT, image, mask, whole=True, generator=generator(), **settings).images, expected)


def test_several_images_of_one_image_each_with_its_own_generator(pipeline: Pipeline, image: Image.Image) -> None:
    settings = {**SETTINGS, "num_inference_steps": 2}
    alone = [
        pipeline(PROMPT, image, generator=torch.Generator().manual_seed(seed), **settings).images for seed in (1, 2)
    ]
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    together = pipeline(PROMPT, image, num_images_per_prompt=2, generator=generators, **settings).images
    assert np.abs(alone[0] - alone[1]).max() > 0.05
    assert_equal_images(together, np.concatenate(alone))


def test_the_whole_unet_and_the_unet_in_parts_draw_the_same(pipeline: Pipeline) -> None:
    whole = Pipeline(pipeline.family, pipeline.submodels, pipeline.companions, split=False)
    settings = {**SETTINGS, "height": SIZE, "width": SIZE}
    expected = whole(PROMPT, generator=generator(), **settings).images
    assert_equal_images(pipeline(PROMPT, generator=generator(), **settings).images, expected)


def test_sessions_of_fixed_shapes_compute_the_same_and_only_some_are_kept(
    pipeline: Pipeline, tiny_pipeline: Path
) -> None:
    """As on CUDA, where each is captured in a graph."""
    loaded = load_submodel(tiny_pipeline, "text_encoder", TARGETS["cpu"], options=LoadOptions(threads=1))
    fixed = Submodel(
        lambda shapes, graph=None, capture=False: create_session(
            loaded.path, TARGETS["cpu"], LoadOptions(threads=1), graph=graph
        ),
        loaded.part,
        loaded.config,
        loaded.place,
        path=loaded.path,
        fixed=True,
        outputs=("last_hidden_state",),
    )
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    for rows in range(1, KEPT + 3):
        ids = np.random.default_rng(rows).integers(0, 1000, (rows, 77), dtype=np.int32)
        expected = loaded(input_ids=ids)
        drawn = fixed(input_ids=ids)
        assert drawn.keys() == {"last_hidden_state"}
        np.testing.assert_allclose(drawn["last_hidden_state"], expected["last_hidden_state"], atol=1e-5)
        kept.add(fixed.bound(input_ids=(rows, 77)))
        del drawn
    assert len(kept) == KEPT


def test_with_little_memory_the_image_is_the_one_that_diffusers_decodes_whole(
    tiny_pipeline: Path, tiny_torch: Any
) -> None:
    """Larger than the VAE's own size, so that there are bands; one submodel is loaded at a time."""
    frugal = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, low_memory=True)
    size = int(frugal.submodels["vae_decoder"].config["sample_size"])
    latents = torch.randn(frugal.latents_shape(1, size + 64, size + 128), generator=generator())
    drawn = frugal.decode(latents)
    with torch.no_grad():
        expected = tiny_torch.vae.decode(latents / tiny_torch.vae.config.scaling_factor).sample
    assert_equal_images(drawn.numpy(), (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy())


def test_with_little_memory_a_submodel_that_failed_does_not_stay_loaded(tiny_pipeline: Path) -> None:
    frugal = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, low_memory=True)
    with pytest.raises(VerificationError):
        frugal.decode(torch.zeros(1, frugal.latents.channels + 1, 8, 8))
    decoder = frugal.submodels["vae_decoder"]
    assert decoder._session is None and not decoder._bound


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"strength": 0.0}, "strength is 0.0"),
        ({"strength": 0.1, "num_inference_steps": 2}, "no steps remain"),
        ({"image": None, "mask_image": Image.new("L", (64, 64))}, "a mask requires an image"),
        ({"image": "a file name"}, "incorrect format"),
        ({"negative_prompt": ["a", "b"]}, "2 negative prompts for 1 prompts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    pipeline: Pipeline, image: Image.Image, given: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        pipeline(PROMPT, **{"image": image, **SETTINGS, **given})


def test_an_unknown_scheduler_is_refused_with_the_nearest_name(pipeline: Pipeline) -> None:
    with pytest.raises(UsageError, match="no scheduler is named 'eulr'; did you mean 'euler'"):
        named_scheduler("eulr", pipeline.scheduler.config, DIFFUSION)


def test_a_scheduler_that_is_not_linear_is_refused() -> None:
    thresholding = diffusers.DPMSolverMultistepScheduler(thresholding=True, algorithm_type="dpmsolver++")
    with pytest.raises(UsageError, match="is not linear in the latents"):
        trace(thresholding, 5)
