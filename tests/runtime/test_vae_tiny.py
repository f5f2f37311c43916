"""TAESD in place of the VAE: images are diffusers' with AutoencoderTiny, wherever it comes from (fp32 on the CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, SIZE, assert_equal, generator
from converted import Converted
from PIL import Image
from safetensors.torch import save_file

from sdflow.build.assemble import assemble
from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, UsageError, WorkflowError
from sdflow.families import FAMILIES
from sdflow.families.shared.noising import DIFFUSION
from sdflow.inspection import inspect
from sdflow.manifest import Origin
from sdflow.passes.registry import catalog
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.drawing.preview import Preview, previewer_of
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.targets import TARGETS
from sdflow.weights.tensors import open_tensors

SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "np"}
REFERENCE = "synthetic:taesd-tiny?seed=3"


def opened(vae: str, model: str = "synthetic:sd15-tiny", allow_pickle: bool = False) -> Checkpoint:
    return open_checkpoint(
        model, digests=PlainDigests(), download=False, components={"vae": vae}, allow_pickle=allow_pickle
    )


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return opened(REFERENCE)


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> diffusers.StableDiffusionPipeline:
    made = load_pipeline(checkpoint)
    assert isinstance(made.vae, diffusers.AutoencoderTiny)
    made.safety_checker = None
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("taesd")
    assemble(
        root / "pipeline",
        parts=converted(checkpoint),
        companions={name: each for name, each in checkpoint.companions.items() if name != "feature_extractor"},
        origin=Origin("tiny", "cpu", family=checkpoint.family.name),
        options=checkpoint.options,
    )
    return root / "pipeline"


@pytest.fixture(scope="module")
def ours(folder: Path) -> Pipeline:
    return Pipeline.load(folder, "cpu", threads=1)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    return Image.fromarray((np.stack([rows, columns, 1 - rows], axis=-1) * 255).astype("uint8"))


def test_text_to_image_equals_diffusers_with_that_vae(
    ours: Pipeline, theirs: diffusers.StableDiffusionPipeline
) -> None:
    settings = {**SETTINGS, "height": SIZE, "width": 2 * SIZE}
    latents = torch.randn(ours.latents_shape(1, SIZE, 2 * SIZE), generator=generator())
    expected = theirs(PROMPT, latents=latents, **settings).images
    assert_equal(ours(PROMPT, latents=latents, **settings).images, expected)


def test_image_to_image_equals_diffusers_that_draws_no_sample(
    ours: Pipeline, theirs: diffusers.StableDiffusionPipeline, image: Image.Image
) -> None:
    """Its encoder gives the latents themselves, so the image itself goes in on both sides."""
    of_them = diffusers.StableDiffusionImg2ImgPipeline(**theirs.components, requires_safety_checker=False)
    of_them.set_progress_bar_config(disable=True)
    settings = {**SETTINGS, "strength": 0.6, "guidance_scale": 7.5}
    expected = of_them(PROMPT, image=image, generator=generator(), **settings).images
    assert_equal(ours(PROMPT, image, generator=generator(), **settings).images, expected)


def test_its_previews_are_images_and_the_last_is_the_image(ours: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "scheduler", named_scheduler("euler", ours.scheduler.config, DIFFUSION))
    seen: list[Preview] = []
    given = {"generator": generator(), "callback_on_preview": seen.append, "height": SIZE, "width": SIZE}
    (image,) = ours(PROMPT, num_inference_steps=4, **given).images
    first, last = np.asarray(seen[0].images()[0], int), np.asarray(seen[-1].images()[0], int)
    assert first.shape == last.shape == (SIZE, SIZE, 3)
    assert np.abs(last - np.asarray(image, int)).max() <= 1, "at the end no noise is left"
    assert np.abs(first - last).max() > 10


def test_another_pipeline_may_draw_its_previews_by_it(ours: Pipeline, folder: Path, tiny_pipeline: Path) -> None:
    other = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, previews=folder)
    latents = torch.randn(1, 4, SIZE // 8, SIZE // 8, generator=generator())
    assert torch.equal(other.preview(latents), ours.decode(latents))
    assert not torch.equal(other.decode(latents), ours.decode(latents))
    with pytest.raises(UsageError, match="not those of Stable Diffusion XL"):
        previewer_of(folder, FAMILIES["stable_diffusion_xl"], ours.latents, TARGETS["cpu"])


def test_it_is_the_same_from_a_folder_and_from_one_file(
    checkpoint: Checkpoint, theirs: diffusers.StableDiffusionPipeline, tmp_path: Path
) -> None:
    """At full size, as it is published: a file has no configuration."""
    vae = load_module("vae_decoder", opened("synthetic:taesd").submodels["vae_decoder"].load)
    vae.save_pretrained(tmp_path / "taesd")
    save_file(vae.state_dict(), tmp_path / "taesd.safetensors")
    torch.save(vae.state_dict(), tmp_path / "taesd.pth")
    places = ("taesd", "taesd.safetensors", "taesd/diffusion_pytorch_model.safetensors", "taesd.pth")
    for place in places:
        found = opened(str(tmp_path / place), allow_pickle=True)
        for half in ("vae_encoder", "vae_decoder"):
            assert found.submodels[half].identity["class"] == "AutoencoderTiny"
            loaded = load_module(half, found.submodels[half].load)
            assert all(torch.equal(each, vae.state_dict()[name]) for name, each in loaded.state_dict().items())
        assert found.facts["scaling_factor"] == 1.0
        assert found.facts["vae_scale_factor"] == 8
        assert not any("another family" in note for note in found.notes)


def conv(inside: int, outside: int, **more: Any) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(inside, outside, 3, padding=1, **more)


class Clamp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        relu = torch.nn.ReLU
        self.conv = torch.nn.Sequential(conv(64, 64), relu(), conv(64, 64), relu(), conv(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x) + x)


def original_halves() -> dict[str, torch.nn.Sequential]:
    """Both networks as their authors write them: https://github.com/madebyollin/taesd, taesd.py."""
    torch.manual_seed(5)

    def down() -> list[torch.nn.Module]:
        return [conv(64, 64, stride=2, bias=False), Block(), Block(), Block()]

    def up() -> list[torch.nn.Module]:
        return [Block(), Block(), Block(), torch.nn.Upsample(scale_factor=2), conv(64, 64, bias=False)]

    encoder = [conv(3, 64), Block(), *down(), *down(), *down(), conv(64, 4)]
    decoder = [Clamp(), conv(4, 64), torch.nn.ReLU(), *up(), *up(), *up(), Block(), conv(64, 3)]
    return {"encoder": torch.nn.Sequential(*encoder), "decoder": torch.nn.Sequential(*decoder)}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_two_files_in_the_original_names_are_what_their_networks_compute(suffix: str, tmp_path: Path) -> None:
    halves = original_halves()
    for name, half in halves.items():
        write = save_file if suffix == "safetensors" else torch.save
        write(half.state_dict(), tmp_path / f"taesd_{name}.{suffix}")
    found = opened(str(tmp_path / f"taesd_decoder.{suffix}"), allow_pickle=True).submodels["vae_decoder"]
    vae = load_module("vae_decoder", found.load)
    assert isinstance(vae, diffusers.AutoencoderTiny)
    pixels, latents = torch.rand(1, 3, 32, 32), torch.randn(1, 4, 4, 4)
    with torch.no_grad():  # the original's pixels are in [0, 1]
        assert torch.allclose(vae.encode(pixels * 2 - 1).latents, halves["encoder"](pixels), atol=1e-5)
        assert torch.allclose(vae.decode(latents).sample, halves["decoder"](latents) * 2 - 1, atol=1e-5)
    assert halves["decoder"](latents).std() > 1e-3, "an image of one colour would prove nothing"
    shapes = {name: tuple(each.shape) for name, each in vae.state_dict().items()}
    with open_tensors("vae_decoder", found.load, shapes) as tensors:
        assert all(np.array_equal(tensors.read(name), each.numpy()) for name, each in vae.state_dict().items())
    other = opened(str(tmp_path / f"taesd_encoder.{suffix}"), allow_pickle=True)
    assert other.submodels["vae_decoder"].identity == found.identity
    (seen,) = inspect(tmp_path / f"taesd_encoder.{suffix}")
    assert (seen.kind, seen.architecture) == ("vae", "taesd")


def test_a_half_for_another_familys_latents_is_none_of_it(tmp_path: Path) -> None:
    """That of Stable Diffusion 3 differs in its last layer alone."""
    encoder = original_halves()["encoder"]
    save_file(torch.nn.Sequential(*encoder[:-1], conv(64, 16)).state_dict(), tmp_path / "taesd3_encoder.safetensors")
    assert inspect(tmp_path / "taesd3_encoder.safetensors")[0].kind == "unknown"
    with pytest.raises(CheckpointError, match="this is not a vae"):
        opened(str(tmp_path / "taesd3_encoder.safetensors"))


def test_one_half_alone_is_told(tmp_path: Path) -> None:
    halves = original_halves()
    save_file(halves["decoder"].state_dict(), tmp_path / "taesd_decoder.safetensors")
    with pytest.raises(CheckpointError, match=r"taesd_encoder\.safetensors is not next to it"):
        opened(str(tmp_path / "taesd_decoder.safetensors"))
    save_file(halves["decoder"].state_dict(), tmp_path / "taesd_encoder.safetensors")
    with pytest.raises(CheckpointError, match=r"not the (en|de)coder that belongs to"):
        opened(str(tmp_path / "taesd_decoder.safetensors"))
    (tmp_path / "taesd_decoder.safetensors").rename(tmp_path / "small.safetensors")
    with pytest.raises(CheckpointError, match="cannot be derived from its name"):
        opened(str(tmp_path / "small.safetensors"))


@pytest.mark.parametrize("model", ["synthetic:sd21-tiny", "synthetic:sdxl-tiny"])
def test_other_families_take_it_too(model: str) -> None:
    found = opened("synthetic:taesd", model)
    assert found.submodels["vae_decoder"].identity["class"] == "AutoencoderTiny"
    assert isinstance(load_pipeline(opened("synthetic:taesd-tiny", model)).vae, diffusers.AutoencoderTiny)


def test_it_is_no_model_alone_and_no_other_component() -> None:
    with pytest.raises(CheckpointError, match="is only a vae"):
        open_checkpoint("synthetic:taesd", digests=PlainDigests(), download=False)


def test_a_workflow_names_it_as_a_component_only(tmp_path: Path) -> None:
    good = "extends: [base/tiny.yaml, base/taesd.yaml]\ntarget: cuda\ncomponents: {vae: synthetic:taesd}\n"
    (tmp_path / "w.yaml").write_text(good)
    (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=catalog()).pipelines
    assert pipeline.components == {"vae": "synthetic:taesd"}
    assert [step.pass_name for step in pipeline.submodels["vae_decoder"]] == ["OnnxConversion", "OnnxFloatToFloat16"]
    (tmp_path / "w.yaml").write_text("extends: base/tiny.yaml\ntarget: cpu\nmodel: synthetic:taesd\n")
    with pytest.raises(WorkflowError, match="unknown synthetic model 'taesd'"):
        load_workflow(tmp_path / "w.yaml", catalog=catalog())


def test_inspect_names_it(tmp_path: Path) -> None:
    vae = load_module("vae_decoder", opened("synthetic:taesd").submodels["vae_decoder"].load)
    vae.save_pretrained(tmp_path / "taesd")
    for path in (tmp_path / "taesd", tmp_path / "taesd/diffusion_pytorch_model.safetensors"):
        (found,) = inspect(path)
        assert (found.kind, found.architecture) == ("vae", "taesd")
        assert found.workflow is not None
        (tmp_path / "w.yaml").write_text(found.workflow)
        (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=catalog()).pipelines
        assert pipeline.components == {"vae": str(path)}
        assert "OrtTransformersOptimization" not in {step.pass_name for step in pipeline.submodels["vae_decoder"]}
