"""Stable Diffusion 3.5, a few channels wide, from a folder that diffusers wrote: built once, then compared with
diffusers' own pipelines of that folder, and used by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, assert_equal, differ, generator, pattern
from original_layout import mmdit_tensors, stable_diffusion_3
from PIL import Image
from safetensors.torch import save_file
from shell import Shell

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.runtime.denoiser import denoisers
from sdflow.runtime.denoiser.halves import HalvedDenoisers
from sdflow.runtime.denoiser.schedule import trace
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint

PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae_decoder")
WORKFLOW = """
extends: base/stable_diffusion_3.yaml
model: {model}
target: cpu
evaluate: {{latency: null, image: {{steps: 2, height: 64, width: 64}}}}
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    return Shell(tmp_path_factory.mktemp("stable_diffusion_3"), started_python)


@pytest.fixture(scope="module")
def folder(shell: Shell) -> Path:
    """As diffusers saves it."""
    checkpoint = open_checkpoint("synthetic:sd35-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(shell.folder / "model")
    return shell.folder / "model"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def built(shell: Shell, folder: Path) -> Path:
    """Built and verified."""
    (shell.folder / "sd3.yaml").write_text(WORKFLOW.format(model=folder))
    (pipeline,) = shell.json("run", "sd3.yaml")["pipelines"]
    assert pipeline["verification"]["passed"]
    return shell.folder / "pipelines/sd3"


@pytest.fixture(scope="module")
def ours(built: Path) -> Pipeline:
    return Pipeline.load(built, "cpu")


@pytest.fixture(scope="module")
def on_two(built: Path) -> Pipeline:
    """With guidance's halves on two devices, which are both this CPU."""
    return Pipeline.load(built, "cpu", devices=2)


@pytest.mark.parametrize(("height", "width", "length"), [(64, 64, None), (96, 64, None), (48, 80, 77)])
def test_an_image_from_text_is_diffusers(
    ours: Pipeline, theirs: Any, height: int, width: int, length: int | None
) -> None:
    latents = torch.randn((1, 16, height // 8, width // 8), generator=generator())
    given: dict[str, Any] = {} if length is None else {"max_sequence_length": length}
    given |= {"negative_prompt": "blurred", "prompt_3": "oil on canvas", "height": height, "width": width}
    given |= {"num_inference_steps": 3, "guidance_scale": 7.0, "latents": latents, "output_type": "np"}
    assert_equal(ours(PROMPT, **given).images, theirs(PROMPT, **given).images)


SKIPPING: list[dict[str, Any]] = [
    {"num_inference_steps": 6, "skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.5},
    {
        "num_inference_steps": 5,
        "skip_guidance_layers": [0, 2],
        "skip_layer_guidance_scale": 4.0,
        "skip_layer_guidance_start": 0.3,
        "skip_layer_guidance_stop": 0.9,
    },
]


@pytest.mark.parametrize("skipping", SKIPPING, ids=["one block", "the first and the last"])
def test_skip_layer_guidance_is_diffusers(
    ours: Pipeline, on_two: Pipeline, theirs: Any, skipping: dict[str, Any]
) -> None:
    assert len(theirs.transformer.transformer_blocks) == 3
    prompts = [PROMPT, "an otter"]
    given: dict[str, Any] = {"negative_prompt": ["blurred", "grey"], "height": 48, "width": 64, "output_type": "np"}
    given |= {"guidance_scale": 7.0, "latents": torch.randn((2, 16, 6, 8), generator=generator())}
    expected = theirs(prompts, **given, **skipping).images
    for pipeline in (ours, on_two):
        assert_equal(pipeline(prompts, **given, **skipping).images, expected)
    assert differ(expected, theirs(prompts, **given, num_inference_steps=skipping["num_inference_steps"]).images)


def test_without_free_memory_the_denoisers_of_one_image_stay_on_two_devices(
    on_two: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoisers, "available_bytes", lambda device: 0)
    given = {"height": 64, "width": 64, "output_type": "latent", **SKIPPING[0]}
    on_two(PROMPT, generator=generator(), **given)
    assert isinstance(on_two.denoisers, HalvedDenoisers)
    first = dict(on_two.denoisers._first.kept)
    assert len(first) == 2, "with all blocks, and without the skipped one"
    on_two(PROMPT, generator=generator(), **given)
    assert on_two.denoisers._first.kept == first, "created again"


def test_skip_layer_guidance_that_cannot_be_is_refused_in_words(ours: Pipeline) -> None:
    def refused(**given: Any) -> UsageError:
        with pytest.raises(UsageError) as caught:
            ours(PROMPT, num_inference_steps=2, height=64, width=64, **given)
        return caught.value

    assert "3 blocks, so block 3" in refused(skip_guidance_layers=[1, 3]).what
    assert "text to image" in refused(skip_guidance_layers=[1], image=pattern(1, 64, 64)).what
    assert "requires prompt guidance" in refused(skip_guidance_layers=[1], guidance_scale=1.0).what
    assert "has no effect without skip_guidance_layers" in refused(skip_layer_guidance_scale=3.0).what
    assert refused(skip_guidance_layers=[-1]).where == "skip_guidance_layers"


@pytest.mark.parametrize(("strength", "height", "width"), [(0.33, 64, 96), (0.6, 64, 64), (1.0, 96, 48)])
def test_an_image_from_an_image_is_diffusers(
    ours: Pipeline, theirs: Any, strength: float, height: int, width: int
) -> None:
    image = pattern(1, height, width)
    pipeline = diffusers.StableDiffusion3Img2ImgPipeline(**theirs.components)
    pipeline.set_progress_bar_config(disable=True)
    given = {"strength": strength, "num_inference_steps": 10, "guidance_scale": 7.0, "output_type": "np"}
    expected = pipeline(PROMPT, image=_mean(theirs, image), **given, generator=generator(), height=height, width=width)
    assert_equal(ours(PROMPT, image, **given, generator=generator()).images, expected.images)


@pytest.mark.parametrize(("strength", "height", "width"), [(0.6, 64, 96), (1.0, 64, 64), (0.8, 96, 48)])
def test_an_image_into_a_mask_is_diffusers(
    ours: Pipeline, theirs: Any, strength: float, height: int, width: int
) -> None:
    """diffusers' latents, decoded by its VAE with the shift: 0.42.1 leaves it out here, and its other two pipelines add it."""
    image, mask = pattern(1, height, width), Image.new("L", (width, height), 0)
    mask.paste(255, (16, 8, width - 8, height - 24))
    pipeline = diffusers.StableDiffusion3InpaintPipeline(**theirs.components)
    pipeline.set_progress_bar_config(disable=True)
    mean = _mean(theirs, image)
    given = {"strength": strength, "num_inference_steps": 5, "guidance_scale": 7.0, "output_type": "latent"}
    expected = pipeline(
        PROMPT,
        image=mean,
        mask_image=mask,
        masked_image_latents=mean,
        **given,
        generator=generator(),
        height=height,
        width=width,
    ).images
    drawn = ours(PROMPT, image, mask, **given, generator=generator()).images
    assert np.abs(drawn - expected.numpy()).max() < 1e-4
    vae = theirs.vae
    with torch.no_grad():
        decoded = vae.decode(expected / vae.config.scaling_factor + vae.config.shift_factor).sample
    given |= {"output_type": "np", "whole": True}
    pixels = ours(PROMPT, image, mask, **given, generator=generator()).images
    assert_equal(pixels, theirs.image_processor.postprocess(decoded, output_type="np"))


def _mean(pipeline: Any, image: Image.Image) -> torch.Tensor:
    """An image's latents, without the noise that diffusers adds when it encodes."""
    pixels = pipeline.image_processor.preprocess(image)
    with torch.no_grad():
        encoded = pipeline.vae.encode(pixels).latent_dist.mode()
    mean: torch.Tensor = (encoded - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    return mean


def test_a_shift_that_depends_on_the_size_is_diffusers() -> None:
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.4, max_shift=1.2)
    noising = FAMILIES["stable_diffusion_3"].noising
    for tokens in (256, 1024, 5000):
        schedule = trace(scheduler, 7, noising=noising, tokens=tokens)
        wanted = diffusers.FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
        wanted.set_timesteps(7, mu=calculate_shift(tokens, 256, 4096, 0.4, 1.2))
        assert torch.equal(schedule.timesteps[:, 0], wanted.timesteps)


def test_diffusers_converter_agrees_on_every_name_of_the_original_layout(theirs: Any) -> None:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    converted = convert_sd3_transformer_checkpoint_to_diffusers(mmdit_tensors(theirs.transformer))
    own = theirs.transformer.state_dict()
    assert converted.keys() == own.keys() and all(torch.equal(converted[name], own[name]) for name in own)


@pytest.mark.parametrize("texts", [0, 2, 3], ids=["no text encoder", "CLIP alone", "with T5"])
def test_a_single_file_holds_what_the_folder_holds(theirs: Any, tmp_path: Path, texts: int) -> None:
    """T5 is left out of it, as a single file has no tokenizer for it."""
    encoders = [theirs.text_encoder, theirs.text_encoder_2, theirs.text_encoder_3][:texts]
    save_file(stable_diffusion_3(theirs.transformer, theirs.vae, *encoders), tmp_path / "sd3.safetensors")
    opened = open_checkpoint(str(tmp_path / "sd3.safetensors"), digests=PlainDigests(), download=False)
    assert opened.family.name == "stable_diffusion_3"
    assert {*opened.submodels} == {"transformer", "vae_encoder", "vae_decoder", *PARTS[: min(texts, 2)]}
    assert any("text_encoder_3" in note and "tokenizer" in note for note in opened.notes) == (texts == 3)
    modules = {"transformer": theirs.transformer, "vae_decoder": theirs.vae}
    modules |= dict(zip(PARTS, encoders[:2], strict=False))
    for name, module in modules.items():
        ours, own = load_module(name, opened.submodels[name].load).state_dict(), dict(module.state_dict())
        if name == "text_encoder":  # the original layout has CLIP-L without its projection
            own["text_projection.weight"] = torch.eye(len(own["text_projection.weight"]))
        assert ours.keys() == own.keys() and all(torch.equal(ours[key], own[key]) for key in own), name


def test_inspect_and_init_know_it(shell: Shell, folder: Path) -> None:
    assert "sd35-tiny" in shell.run("inspect", str(folder)).stdout
    done = shell.run("init", "--model", str(folder), "--target", "cpu", "--out", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "extends: base/stable_diffusion_3.yaml" in (shell.folder / "mine.yaml").read_text()
    assert shell.run("validate", "mine.yaml").returncode == 0


def test_a_file_without_text_encoders_draws_beside_a_folder_that_has_them(
    shell: Shell, folder: Path, theirs: Any
) -> None:
    """The workflow is that of `init`, with the folder named in it. The file's weights are not the folder's."""
    other = load_pipeline(open_checkpoint("synthetic:sd35-tiny?seed=5", digests=PlainDigests(), download=False))
    save_file(stable_diffusion_3(other.transformer, other.vae), shell.folder / "half.safetensors")
    assert "components: {vae: half.safetensors" in shell.run("inspect", "half.safetensors").stdout
    done = shell.run("init", "--model", "half.safetensors", "--target", "cpu", "--out", "half.yaml")
    assert done.returncode == 0, done.stderr
    text = (shell.folder / "half.yaml").read_text()
    assert text.count("hf:owner/name") == 1
    text = text.replace("hf:owner/name", str(folder)).replace("verify: quick", "verify: false\nevaluate: null")
    (shell.folder / "half.yaml").write_text(text)
    shell.json("run", "half.yaml")
    expected = diffusers.StableDiffusion3Pipeline(
        **{**theirs.components, "transformer": other.transformer, "vae": other.vae}
    )
    expected.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"negative_prompt": "blurred", "height": 64, "width": 64, "num_inference_steps": 3}
    given |= {"guidance_scale": 7.0, "latents": torch.randn((1, 16, 8, 8), generator=generator()), "output_type": "np"}
    drawn = Pipeline.load(shell.folder / "pipelines/half", "cpu")(PROMPT, **given).images
    assert_equal(drawn, expected(PROMPT, **given).images)


def test_generate_draws_and_says_with_what(shell: Shell, built: Path) -> None:
    given = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "48")
    settings = shell.json("generate", str(built), *given)["settings"]
    assert settings["guidance_scale"] == 4.5 and settings["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    with Image.open(shell.folder / "images/001-1.png") as image:
        assert image.size == (48, 64) and json.loads(image.info["sdflow"])["steps"] == 2
        plain = np.asarray(image, np.int16)
    skipping = ("--skip-guidance-layers", "1,2", "--skip-layer-guidance-stop", "0.9", "--out", "skipping")
    skipping += ("--skip-layer-guidance-scale", "100")  # the second of two steps changes little
    shell.json("generate", str(built), *given, *skipping)
    with Image.open(shell.folder / "skipping/001-1.png") as image:
        assert json.loads(image.info["sdflow"])["skip_guidance_layers"] == [1, 2]
        assert np.abs(np.asarray(image, np.int16) - plain).max() > 8


def test_a_scheduler_of_noise_is_refused_by_name(shell: Shell, built: Path) -> None:
    done = shell.run("generate", str(built), "--prompt", "an otter", "--steps", "2", "--scheduler", "DPM++ 2M")
    assert (
        done.returncode == 2
        and "dpm++_2m does not fit this model" in done.stderr
        and "flow_euler" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_without_t5_an_image_is_that_of_diffusers_without_t5(shell: Shell, folder: Path) -> None:
    """Built, drawn, and verified and baked again from what its manifest says."""
    text = WORKFLOW.format(model=folder) + "components: {text_encoder_3: null}\n"
    (shell.folder / "clip.yaml").write_text(text)
    shell.json("run", "clip.yaml", "--no-evaluate", "--no-verify")
    built = shell.folder / "pipelines/clip"
    manifest = json.loads((built / "sdflow.json").read_text())
    assert manifest["components"] == {"text_encoder_3": None}
    assert not [name for name in manifest["checkpoint"]["files"] if name.startswith(("text_encoder_3", "tokenizer_3"))]
    assert not [path for path in built.iterdir() if path.name in ("text_encoder_3", "tokenizer_3")]
    theirs = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    theirs.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"negative_prompt": "blurred", "height": 64, "width": 64, "num_inference_steps": 3}
    given |= {"guidance_scale": 7.0, "latents": torch.randn((1, 16, 8, 8), generator=generator()), "output_type": "np"}
    assert_equal(Pipeline.load(built, "cpu")(PROMPT, **given).images, theirs(PROMPT, **given).images)
    assert shell.run("verify", str(built)).returncode == 0
    baked = shell.run(
        "bake", "--base", str(built), "--lora", str(_lora(theirs, shell.folder)), "--out", "pipelines/baked"
    )
    assert baked.returncode == 0, baked.stderr
    assert (
        json.loads((shell.folder / "pipelines/baked/sdflow.json").read_text())["components"] == manifest["components"]
    )


def _lora(pipeline: Any, folder: Path) -> Path:
    """Of one layer of the transformer."""
    name = "transformer_blocks.0.attn.to_q"
    rows, columns = pipeline.transformer.get_submodule(name).weight.shape
    lora = {"A": torch.full((2, columns), 0.01), "B": torch.full((rows, 2), 0.01)}
    save_file({f"transformer.{name}.lora_{end}.weight": each for end, each in lora.items()}, folder / "l.safetensors")
    return folder / "l.safetensors"
