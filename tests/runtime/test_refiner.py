"""The refiner of SDXL draws what diffusers' pipeline of image to image draws without a first text encoder (fp32, CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from original_layout import refiner_of_xl
from PIL import Image
from safetensors.torch import save_file
from tiny_pipeline import artifact_of

from sdflow.assemble import assemble
from sdflow.errors import CheckpointError, PassError, UsageError
from sdflow.families import FAMILIES, family_of_index
from sdflow.manifest import Origin
from sdflow.models.unet import RefinerUNet, UNet
from sdflow.passes.base import PassInputs
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.runtime.folder import folder_family, folder_task, read_index
from sdflow.runtime.generate import GenerateRequest, generate
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


@pytest.fixture(scope="module")
def ours(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    root, family = tmp_path_factory.mktemp("refiner"), checkpoint.family
    for name, submodel in checkpoint.submodels.items():
        (root / name).mkdir()
        OnnxConversion().run(PassInputs(name, None, submodel.load, family.name), root / name, OnnxConversionConfig())
    folder = root / "pipeline"
    assemble(
        folder,
        parts={name: artifact_of(root / name) for name in checkpoint.submodels},
        companions=checkpoint.companions,
        origin=Origin("refiner", "cpu", family=family.name),
        options=checkpoint.options,
    )
    made = Pipeline.load(folder, "cpu", threads=1)
    made.folder = folder  # type: ignore[attr-defined]
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


def test_its_folder_is_that_of_the_refiner_and_says_that_it_wants_an_image(ours: Pipeline, tmp_path: Path) -> None:
    folder: Path = ours.folder  # type: ignore[attr-defined]
    index = read_index(folder)
    assert index["_class_name"] == "ORTStableDiffusionXLImg2ImgPipeline"
    assert index["text_encoder"] == index["tokenizer"] == [None, None]
    assert index["requires_aesthetics_score"] is True
    assert folder_family(folder).name == "stable_diffusion_xl_refiner" and folder_task(folder) == "image"
    with pytest.raises(UsageError, match="goes on from an image") as caught:
        ours(PROMPT)
    assert caught.value.where == "image"
    with pytest.raises(UsageError, match="goes on from an image") as caught:
        generate(GenerateRequest(folder=folder, prompts=[PROMPT], out=tmp_path))
    assert caught.value.where == "--image"
    with pytest.raises(UsageError, match="knows no prompt_2"):
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
    with pytest.raises(PassError, match="the UNet of the refiner"):
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
