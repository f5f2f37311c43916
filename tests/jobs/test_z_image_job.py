"""Z-Image, a few channels wide, by every command: its images are those of diffusers' own pipelines."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from beside_diffusers import generator, pattern
from diffusers import ZImageImg2ImgPipeline, ZImagePipeline
from diffusers.pipelines.z_image import pipeline_z_image_img2img
from one_file_program import draw_by_one_file
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from serve.conftest import running_server
from shell import Shell
from tiny_z_image import tiny_z_image
from until import PATIENCE

from sdflow.errors import UsageError
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.submodel import Submodel

SIZE = ("--height", "64", "--width", "48", "--steps", "2", "--seed", "1", "--threads", "1")
PROMPT, LONG = "an otter", "an otter on a raft of reeds, " * 6
"""Of 14 and 60 tokens: of different multiples of 32."""
LAYERS = ("to_q", "to_v", "to_out.0", "w1", "w2", "layers.0.adaLN_modulation.0", "cap_embedder.1")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    return Shell(tmp_path_factory.mktemp("z_image"), started_python)


@pytest.fixture(scope="module")
def theirs(shell: Shell) -> ZImagePipeline:
    """As diffusers saves and loads it, in `z`."""
    tiny_z_image().save_pretrained(shell.folder / "z")
    pipeline = ZImagePipeline.from_pretrained(shell.folder / "z")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def built(shell: Shell, theirs: ZImagePipeline) -> str:
    """By the workflow that `init` writes, and verified."""
    done = shell.run("init", "--model", "z", "--out", "z.yaml")
    assert done.returncode == 0, done.stderr
    (pipeline,) = shell.json("run", "z.yaml", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    return "pipelines/z"


@pytest.fixture(scope="module")
def ours(shell: Shell, built: str) -> Pipeline:
    return Pipeline.load(shell.folder / built, "cpu", threads=1)


def largest(drawn: Any, expected: np.ndarray) -> float:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    return float(np.abs(drawn - expected).max())


def test_it_is_inspected_and_planned(shell: Shell, built: str) -> None:
    assert "z-image-tiny" in shell.run("inspect", "z").stdout
    assert "transformer" in shell.run("plan", "z.yaml", "--set", "model=synthetic:z-image-turbo").stdout


def test_its_attentions_are_fused(shell: Shell, built: str) -> None:
    """Two refiners of one block and three layers; of these, all but the noise refiner have a mask."""
    graph = onnx.load(shell.folder / built / "transformer/model.onnx", load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "MultiHeadAttention"]
    assert Counter(len(node.input) for node in attentions) == {3: 1, 6: 4}
    assert not any(node.op_type == "Softmax" for node in graph.node)


@pytest.mark.parametrize(
    ("prompts", "height", "width", "guidance", "negative"),
    [
        ([PROMPT], 64, 64, 0.0, None),
        ([LONG], 64, 96, 0.0, None),
        ([PROMPT], 80, 48, 4.0, LONG),  # both halves of a run of different lengths
        ([PROMPT, LONG], 64, 48, 0.0, None),
    ],
)
def test_images_from_text_are_those_of_diffusers(
    theirs: ZImagePipeline, ours: Pipeline, prompts: list[str], height: int, width: int, guidance: float, negative: str
) -> None:
    latents = torch.randn((len(prompts), 16, height // 8, width // 8), generator=generator())
    both: dict[str, Any] = {"height": height, "width": width, "num_inference_steps": 3, "guidance_scale": guidance}
    both |= {"latents": latents, "output_type": "np"}
    expected = theirs(list(prompts), negative_prompt=None if negative is None else [negative], **both).images
    assert largest(ours(prompts, negative_prompt=negative, **both).images, expected) < 1e-4


@pytest.mark.parametrize("limits", [{"cfg_truncation": 0.2}, {"cfg_truncation": 0.2, "cfg_normalization": 0.6}])
def test_limits_of_guidance_are_those_of_diffusers(
    theirs: ZImagePipeline, ours: Pipeline, limits: dict[str, float]
) -> None:
    """Two of the four steps are guided."""
    prompts, latents = [PROMPT, "a heron"], torch.randn((2, 16, 6, 8), generator=generator())
    both: dict[str, Any] = {"height": 48, "width": 64, "num_inference_steps": 4, "guidance_scale": 4.0}
    both |= {"latents": latents, "output_type": "np"}
    found = ours(prompts, **both, **limits).images
    assert largest(found, theirs(prompts, **both, **limits).images) < 1e-4
    with_fewer = {name: value for name, value in limits.items() if len(limits) > 1 and name == "cfg_truncation"}
    assert np.abs(found - ours(prompts, **both, **with_fewer).images).max() > 1e-3
    with pytest.raises(UsageError, match="limits prompt guidance"):
        ours(PROMPT, guidance_scale=0.0, **limits)


def test_a_step_that_hides_no_text_has_no_mask_and_gives_the_same(
    theirs: ZImagePipeline, ours: Pipeline, shell: Shell, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU each session has its own weights, and all steps keep the mask; here one does as on a GPU."""
    latents = torch.randn((2, 16, 8, 6), generator=generator())
    both: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2, "guidance_scale": 0.0}
    both |= {"latents": latents, "output_type": "np"}
    ours([LONG, LONG], **both)  # so that its sessions are there
    masked: list[int] = []
    create = Submodel.part_session

    def recorded(self: Submodel, graph: onnx.ModelProto, **options: Any) -> Any:
        if graph.graph.name == "step":
            masked.append(
                sum(node.op_type == "MultiHeadAttention" and len(node.input) == 6 for node in graph.graph.node)
            )
        return create(self, graph, **options)

    monkeypatch.setattr(Submodel, "part_session", recorded)
    pipeline = Pipeline.load(shell.folder / built, "cpu", threads=1)
    pipeline.denoisers.shares_weights = True

    def taken() -> list[int]:
        return list(pipeline.denoisers._taken.values())

    def differs(*prompts: str) -> float:
        return largest(pipeline(list(prompts), **both).images, ours(list(prompts), **both).images)

    assert differs(LONG, LONG) < 1e-5
    assert masked == [0]
    (before,) = taken()
    assert differs(PROMPT, LONG) < 1e-5
    assert masked == [0, 3]
    assert taken() == [2 * before], "it counts as one more"
    expected = theirs([PROMPT, LONG], **both).images
    assert largest(pipeline([PROMPT, LONG], **both).images, expected) < 1e-4
    assert differs(LONG, LONG) < 1e-5
    assert differs(LONG, PROMPT) < 1e-5
    assert masked == [0, 3], "a session was made again"


def test_an_image_from_an_image_is_that_of_diffusers(
    theirs: ZImagePipeline, ours: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers draws a sample of the encoder's distribution; here it takes the mean, as an exported encoder must."""
    mean = functools.partial(pipeline_z_image_img2img.retrieve_latents, sample_mode="argmax")
    monkeypatch.setattr(pipeline_z_image_img2img, "retrieve_latents", mean)
    image = pattern(1, 64, 96)
    both: dict[str, Any] = {"num_inference_steps": 3, "strength": 0.7, "guidance_scale": 0.0, "output_type": "np"}
    other = ZImageImg2ImgPipeline(**theirs.components)
    other.set_progress_bar_config(disable=True)
    expected = other(PROMPT, image=image, generator=generator(), **both).images
    assert largest(ours(PROMPT, image, generator=generator(), **both).images, expected) < 1e-4


def test_a_shift_by_size_is_that_of_diffusers(theirs: ZImagePipeline, ours: Pipeline) -> None:
    scheduler = type(theirs.scheduler).from_config({**theirs.scheduler.config, "use_dynamic_shifting": True})
    noising = ours.family.noising
    noising.set_timesteps(scheduler, 4, 24)
    found = scheduler.timesteps.clone()
    theirs_with = ZImagePipeline(**{**theirs.components, "scheduler": scheduler})
    theirs_with.set_progress_bar_config(disable=True)
    theirs_with(PROMPT, height=64, width=96, num_inference_steps=4, guidance_scale=0.0, output_type="latent")
    assert torch.equal(found, theirs_with.scheduler.timesteps) and not torch.equal(found, found.round())


def test_defaults_are_those_of_turbo_and_of_the_model_that_it_was_made_of(ours: Pipeline) -> None:
    assert (ours.defaults["text"].steps, ours.defaults["text"].guidance_scale) == (8, 0.0)
    base = ours.family.defaults_of(ours.configs, {"shift": 6.0}, {})
    assert (base["text"].steps, base["text"].guidance_scale) == (50, 4.0)


def pixels(shell: Shell, folder: str, out: str, *more: str) -> np.ndarray:
    shell.json("generate", folder, "--prompt", PROMPT, *SIZE, *more, "--out", out)
    with Image.open(shell.folder / out / "001-1.png") as image:
        return np.asarray(image)


def test_generate_draws_into_a_mask(shell: Shell, built: str) -> None:
    Image.new("RGB", (48, 64), (200, 30, 90)).save(shell.folder / "image.png")
    mask = Image.new("L", (48, 64), 0)
    mask.paste(255, (0, 0, 48, 32))
    mask.save(shell.folder / "mask.png")
    masked = pixels(shell, built, "masked", "--image", "image.png", "--strength", "0.9", "--mask", "mask.png")
    assert (masked[32:] == (200, 30, 90)).all() and (masked[:32] != (200, 30, 90)).any()


@pytest.mark.parametrize(
    "by", ["original", *(pytest.param(each, marks=pytest.mark.slow) for each in ("PEFT", "diffusers", "kohya"))]
)
def test_a_lora_is_baked_and_verified_against_diffusers(
    shell: Shell, built: str, theirs: ZImagePipeline, by: str
) -> None:
    """In the names of the library, of PEFT, of kohya, and of the original layout, whose q, k and v are one module. By default
    the last alone: PEFT's are those of `test_flux2_job.py`, the library's of `test_other_family_job.py`."""
    torch.manual_seed(7)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=list(LAYERS), init_lora_weights=False)
    module = tiny_z_image().transformer
    file = shell.folder / by
    if by == "PEFT":
        get_peft_model(module, config).save_pretrained(file)
    elif by == "diffusers":
        module.add_adapter(config)
        ZImagePipeline.save_lora_weights(file, transformer_lora_layers=get_peft_model_state_dict(module))
    else:
        file = file.with_suffix(".safetensors")
        names = ("layers.1.attention.to_q", "context_refiner.0.feed_forward.w1", "noise_refiner.0.adaLN_modulation.0")
        if by == "original":
            names = ("layers.1.attention.qkv", "layers.0.attention.out", "noise_refiner.0.feed_forward.w3")
        save_file(dict(_factors(module, names, kohya=by == "kohya")), file)
    baked = shell.json("bake", "--base", built, "--lora", f"{file.name}:0.5", "--out", f"baked/{by}", "--verify")[
        "pipeline"
    ]
    assert baked["verification"]["passed"]
    assert (pixels(shell, f"baked/{by}", f"with_{by}") != pixels(shell, built, f"without_{by}")).any()


def _factors(module: Any, names: tuple[str, ...], *, kohya: bool) -> Any:
    random = torch.Generator().manual_seed(3)
    for name in names:
        inner = name.replace("attention.qkv", "attention.to_q").replace("attention.out", "attention.to_out.0")
        out, into = module.get_submodule(inner).weight.shape
        out *= 3 if name.endswith("qkv") else 1
        stem = "lora_unet_" + name.replace(".", "_") if kohya else f"diffusion_model.{name}"
        down, up = ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
        yield f"{stem}.{down}.weight", torch.randn((2, into), generator=random) * 0.3
        yield f"{stem}.{up}.weight", torch.randn((out, 2), generator=random) * 0.3
        if kohya:
            yield f"{stem}.alpha", torch.tensor(1.0)


@pytest.mark.slow  # its images are held to diffusers above; a bench of transformers is in test_flux2_job
def test_bench_compares_it_with_diffusers(shell: Shell, built: str) -> None:
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", built, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}


@pytest.mark.slow
def test_tune_chooses(shell: Shell, built: str) -> None:
    tuned = shell.json("tune", built, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"


def test_a_server_draws_prompts_of_different_lengths(shell: Shell, built: str) -> None:
    with running_server(str(shell.folder / built), environment=shell.environment(), started=shell.started) as server:
        for prompt in (PROMPT, LONG):
            wanted = {"prompt": prompt, "size": "64x64", "steps": 2, "response_format": "b64_json"}
            answer = httpx.post(f"{server.url}/v1/images/generations", json=wanted, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
                assert image.size == (64, 64)


def test_one_file_draws_the_same(shell: Shell, built: str, ours: Pipeline) -> None:
    """With guidance, which counts as in diffusers there too, and prompts of different lengths, each padded to 512 tokens."""
    size = ("--height", "64", "--width", "48", "--schedule", "flow_euler,2", "--guidance-scale", "4")
    done = shell.run("export", built, "--one-file", "one/z.onnx", *size)
    assert done.returncode == 0, done.stderr
    latents = torch.randn((1, 16, 8, 6), generator=generator())
    both: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2, "guidance_scale": 4.0}
    expected = ours(PROMPT, negative_prompt=LONG, latents=latents, output_type="np", **both).images
    assert largest(draw_by_one_file(shell.folder / "one/z.onnx", PROMPT, latents.numpy(), LONG, 4.0), expected) < 1e-4


def test_for_cuda_it_is_bfloat16_and_verified(shell: Shell, theirs: ZImagePipeline, built: str) -> None:
    (pipeline,) = shell.json("run", "z.yaml", "--target", "cuda", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    folder = Path(shell.folder / "pipelines" / pipeline["name"])
    graph = onnx.load(folder / "transformer/model.onnx", load_external_data=False).graph
    assert {each.data_type for each in graph.initializer if len(each.dims) > 1} == {onnx.TensorProto.BFLOAT16}
    report = json.loads((shell.folder / "results" / f"{folder.name}.verify.json").read_text())
    (output,) = report["submodels"]["transformer"]["outputs"]
    assert output["ratio"] < 1.2
