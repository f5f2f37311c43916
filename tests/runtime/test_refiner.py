"""The refiner of SDXL draws what diffusers' pipeline of image to image draws without a first text encoder (fp32, CPU)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from converted import Converted, artifact_of
from original_layout import refiner_of_xl
from PIL import Image
from safetensors.torch import save_file

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.errors import CheckpointError, PassError, UsageError
from sdflow.families import FAMILIES, family_of_index
from sdflow.families.shared.noising import DIFFUSION
from sdflow.manifest import Origin
from sdflow.models.unet import RefinerUNet, UNet
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import folder_family, folder_task, read_index
from sdflow.runtime.generate import generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint

TOLERANCE = 1e-4  # of pixel values in [0, 1]
SIZE = 64
PROMPT = "a horse on the moon"
SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "strength": 0.6, "output_type": "np"}
WORDS: dict[str, dict[str, Any]] = {
    "with guidance and nothing else": {},
    "without guidance": {"guidance_scale": 1.0},
    "with a negative prompt": {"negative_prompt": "blurry"},
    "with scores": {"aesthetic_score": 2.0, "negative_aesthetic_score": 8.0},
    "with sizes": {"original_size": (300, 200), "crops_coords_top_left": (16, 8)},
    "several images": {"num_images_per_prompt": 2},
}


def opened(reference: Path | str) -> Checkpoint:
    return open_checkpoint(str(reference), digests=PlainDigests(), download=False)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return opened("synthetic:sdxl-refiner-tiny")


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    made = diffusers.StableDiffusionXLImg2ImgPipeline(
        **load_pipeline(checkpoint).components, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False
    )
    made.set_progress_bar_config(disable=True)
    return made


def built(checkpoint: Checkpoint, root: Path, name: str, parts: dict[str, Artifact]) -> Path:
    """A pipeline folder."""
    assemble(
        root / "pipeline",
        parts=parts,
        companions=checkpoint.companions,
        origin=Origin(name, "cpu", family=checkpoint.family.name),
        options=checkpoint.options,
    )
    return root / "pipeline"


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(checkpoint, tmp_path_factory.mktemp("refiner"), "refiner", converted(checkpoint))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Pipeline:
    return Pipeline.load(folder, "cpu", threads=1)


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return opened("synthetic:sdxl-tiny")


@pytest.fixture(scope="module")
def base_folder(folder: Path, base: Checkpoint, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, with the refiner's second text encoder and VAE: they are the same."""
    same = ("text_encoder_2", "vae_encoder", "vae_decoder")
    parts = {part: artifact_of(folder / part) for part in same}
    parts.update(converted(base, base.submodels.keys() - parts.keys()))
    return built(base, tmp_path_factory.mktemp("base"), "base", parts)


@pytest.fixture(scope="module")
def ensemble(base_folder: Path, folder: Path) -> Ensemble:
    return Ensemble.load(base_folder, folder, "cpu", threads=1)


@pytest.fixture(scope="module")
def their_base(base: Checkpoint) -> Any:
    made = diffusers.StableDiffusionXLPipeline(**load_pipeline(base).components, add_watermarker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def image() -> Image.Image:
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    return Image.fromarray((np.stack([rows, columns, 1 - rows], axis=-1) * 255).astype("uint8"))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def latents_of(theirs: Any, image: Image.Image) -> torch.Tensor:
    """What diffusers encodes the image to, without the noise that it would draw for that."""
    with torch.no_grad():
        encoded: torch.Tensor = theirs.vae.encode(theirs.image_processor.preprocess(image)).latent_dist.mode()
    return encoded * theirs.vae.config.scaling_factor


@pytest.mark.parametrize("words", WORDS)
def test_the_refiner_alone_equals_diffusers(ours: Pipeline, theirs: Any, image: Image.Image, words: str) -> None:
    settings = {**SETTINGS, **WORDS[words]}
    expected = theirs(PROMPT, image=latents_of(theirs, image), generator=generator(), **settings).images
    drawn = ours(PROMPT, image, generator=generator(), **settings).images
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    assert np.abs(drawn - expected).max() <= TOLERANCE
    if words in ("with scores", "with sizes"):
        plain = ours(PROMPT, image, generator=generator(), **SETTINGS).images
        assert np.abs(plain - drawn).max() > 10 * TOLERANCE, "the argument changes nothing"


@pytest.mark.parametrize(
    "scheduler",
    [
        *("euler_a", "dpm++_2m", "unipc", "dpm2_a"),  # with a memory, and with steps of two halves
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("euler", "ddim", "pndm", "heun")),
    ],
)
def test_base_and_refiner_together_equal_diffusers(
    ensemble: Ensemble, their_base: Any, theirs: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pipeline in (ensemble.base, ensemble.refiner, their_base, theirs):
        monkeypatch.setattr(pipeline, "scheduler", named_scheduler(scheduler, pipeline.scheduler.config, DIFFUSION))
    one, other = generator(), generator()
    both = {"num_inference_steps": 5, "negative_prompt": "blurry"}
    size = {"height": SIZE, "width": 2 * SIZE}
    latents = their_base(PROMPT, denoising_end=0.6, output_type="latent", generator=one, **both, **size).images
    expected = theirs(PROMPT, image=latents, denoising_start=0.6, output_type="np", generator=one, **both).images
    drawn = ensemble(PROMPT, refiner_start=0.6, output_type="np", generator=other, **both, **size).images
    assert expected.std() > 0.05 and drawn.shape == expected.shape
    assert np.abs(drawn - expected).max() <= TOLERANCE
    alone = their_base(PROMPT, output_type="np", generator=generator(), **both, **size).images
    assert np.abs(alone - drawn).max() > 10 * TOLERANCE, "the refiner changes nothing"


def test_each_of_the_two_takes_its_own_arguments(ensemble: Ensemble, their_base: Any, theirs: Any) -> None:
    both = {"num_inference_steps": 4, "num_images_per_prompt": 2}
    words, scores, size = {"prompt_2": "ink"}, {"aesthetic_score": 2.0}, {"original_size": (300, 200)}
    one, other = generator(), generator()
    given = {"denoising_end": 0.5, "output_type": "latent", "height": SIZE, "width": SIZE}
    latents = their_base(PROMPT, generator=one, **both, **words, **size, **given).images
    given = {"denoising_start": 0.5, "output_type": "np"}
    expected = theirs(PROMPT, image=latents, generator=one, **both, **scores, **size, **given).images
    given = {"refiner_start": 0.5, "output_type": "np", "height": SIZE, "width": SIZE}
    drawn = ensemble(PROMPT, generator=other, **both, **words, **scores, **size, **given).images
    assert np.abs(drawn - expected).max() <= TOLERANCE


def test_what_both_have_is_loaded_once(ensemble: Ensemble) -> None:
    base, refiner = ensemble.base.submodels, ensemble.refiner.submodels
    assert {name for name in refiner if refiner[name] is base.get(name)} == {
        "text_encoder_2",
        "vae_encoder",
        "vae_decoder",
    }


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"refiner_start": 1.0}, "denoising_end"),
        ({"mask_image": Image.new("L", (SIZE, SIZE)), "image": Image.new("RGB", (SIZE, SIZE))}, "mask_image"),
        ({"prompt_3": "a"}, "prompt_3"),
    ],
)
def test_what_an_ensemble_cannot_do_is_refused(ensemble: Ensemble, given: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        ensemble(PROMPT, **given)
    assert caught.value.where == where


def test_no_step_left_for_one_of_them_is_told(ensemble: Ensemble) -> None:
    with pytest.raises(UsageError, match="no steps remain of 2 between"):
        ensemble(PROMPT, refiner_start=0.2, num_inference_steps=2, height=SIZE, width=SIZE)


def test_generate_draws_with_both(base_folder: Path, folder: Path, tmp_path: Path) -> None:
    request = GenerateRequest(
        folder=base_folder, refiner=folder, prompts=[PROMPT], out=tmp_path, steps=4, height=SIZE, width=SIZE, seed=1
    )
    request = replace(request, threads=1, more={"prompt_2": "ink", "aesthetic_score": 7.0})
    settings = generate(request).settings
    assert settings["refiner"]["start"] == 0.8 and settings["refiner"]["pipeline"] == "refiner"
    with Image.open(tmp_path / "001-1.png") as drawn:
        assert drawn.size == (SIZE, SIZE)
    for wrong, where in (
        ({"refiner_start": 1.5}, "--refiner-start"),
        ({"refiner": None, "refiner_start": 0.5}, "--refiner-start"),
        ({"image": folder, "mask": folder}, "--mask"),
        ({"more": {"prompt_3": "a"}}, "prompt_3"),
    ):
        with pytest.raises(UsageError) as caught:
            generate(replace(request, **wrong))
        assert caught.value.where == where


def test_its_folder_is_that_of_the_refiner_and_says_that_it_wants_an_image(
    ours: Pipeline, folder: Path, tmp_path: Path
) -> None:
    index = read_index(folder)
    assert index["_class_name"] == "ORTStableDiffusionXLImg2ImgPipeline"
    assert index["text_encoder"] == index["tokenizer"] == [None, None]
    assert index["requires_aesthetics_score"] is True
    assert folder_family(folder).name == "stable_diffusion_xl_refiner" and folder_task(folder) == "image"
    with pytest.raises(UsageError, match="requires a start image") as caught:
        ours(PROMPT)
    assert caught.value.where == "image"
    with pytest.raises(UsageError, match="requires a start image") as caught:
        generate(GenerateRequest(folder=folder, prompts=[PROMPT], out=tmp_path))
    assert caught.value.where == "--image"
    with pytest.raises(UsageError, match="has no argument prompt_2"):
        ours(PROMPT, Image.new("RGB", (SIZE, SIZE)), prompt_2="ink")


@pytest.mark.parametrize("how", ["folder", "file"])
def test_folders_and_files_are_known_as_the_refiner(
    checkpoint: Checkpoint, theirs: Any, how: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if how == "folder":
        theirs.save_pretrained(path)
    else:
        path = tmp_path / "model.safetensors"
        save_file(refiner_of_xl(theirs.unet, theirs.vae, theirs.text_encoder_2), path)
    found = opened(path)
    assert found.family.name == "stable_diffusion_xl_refiner" and found.options == checkpoint.options
    assert found.submodels.keys() == checkpoint.submodels.keys() and "tokenizer" not in found.companions
    for name, submodel in found.submodels.items():
        expected = load_module(name, checkpoint.submodels[name].load).state_dict()
        read = load_module(name, submodel.load).state_dict()
        assert read.keys() == expected.keys() and all(torch.equal(read[key], expected[key]) for key in expected)


def test_the_base_for_image_to_image_has_the_same_class_and_is_no_refiner() -> None:
    index = {"_class_name": "StableDiffusionXLImg2ImgPipeline", "tokenizer": ["transformers", "CLIPTokenizer"]}
    found = [
        family_of_index({**index, "text_encoder": text}) for text in (["transformers", "CLIPTextModel"], [None, None])
    ]
    assert [family and family.name for family in found] == ["stable_diffusion_xl"] * 2, "a tokenizer is there"
    refiner = family_of_index({**index, "text_encoder": [None, None], "tokenizer": [None, None]})
    assert refiner is not None and refiner.name == "stable_diffusion_xl_refiner"


def test_what_is_equal_to_the_base_has_its_identity(checkpoint: Checkpoint) -> None:
    base = opened("synthetic:sdxl-tiny").submodels
    same = {name for name, each in checkpoint.submodels.items() if each.identity == base[name].identity}
    assert same == {"text_encoder_2", "vae_encoder", "vae_decoder"}


def test_at_full_size_the_unet_is_told_from_that_of_the_base() -> None:
    config = opened("synthetic:sdxl-refiner").submodels["unet"].load["config"]
    ports = {port.name: port.axes for port in RefinerUNet().ports(config).inputs}
    assert ports["time_ids"] == ("batch", 5) and ports["text_embeds"] == ("batch", 1280)
    with pytest.raises(PassError, match="the SDXL refiner's UNet"):
        UNet().ports(config)


def test_a_refiner_with_the_first_text_encoder_named_is_no_refiner(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(
        index.read_text().replace('"text_encoder": [\n    null,\n    null\n  ]', '"text_encoder": ["x", "y"]')
    )
    with pytest.raises(CheckpointError, match="no such file") as caught:
        opened(tmp_path)
    assert "text_encoder" in str(caught.value.where)


def test_its_family_takes_no_controlnets_and_the_loras_of_what_it_has() -> None:
    family = FAMILIES["stable_diffusion_xl_refiner"]
    assert family.net is None and family.with_loras == ("text_encoder_2", "unet")
