"""FLUX.1-dev, a few channels wide, from a folder that diffusers wrote, and with the transformer from a file as Black Forest Labs
publish it: built, held to diffusers' own pipeline, and used by the commands."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import onnxruntime
import pytest
import torch
from beside_diffusers import PROMPT, assert_equal, generator
from low_bit_files import T, by_gguf, mixed, t5_by_llama_cpp, write_gguf
from original_layout import flux_tensors
from PIL import Image
from safetensors.torch import save_file
from serve.conftest import running_server
from shell import Shell
from until import PATIENCE

from sdflow.families.flux.packing import packed
from sdflow.families.shared.text import token_ids
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint

DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "48", "--threads", "1")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    return Shell(tmp_path_factory.mktemp("flux"), started_python)


@pytest.fixture(scope="module")
def theirs(shell: Shell) -> Any:
    """diffusers' pipeline, saved by it in `model`, its transformer in `bfl.safetensors` too."""
    checkpoint = open_checkpoint("synthetic:flux1-dev-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(shell.folder / "model")
    pipeline = diffusers.FluxPipeline.from_pretrained(shell.folder / "model")
    pipeline.set_progress_bar_config(disable=True)
    save_file(flux_tensors(pipeline.transformer), shell.folder / "bfl.safetensors")
    return pipeline


@pytest.fixture(scope="module")
def built(shell: Shell, theirs: Any) -> str:
    """By the workflow that `init` writes, fused for the CPU, and verified."""
    done = shell.run("init", "--model", "model", "--target", "cpu", "--out", "flux.yaml")
    assert done.returncode == 0, done.stderr
    assert "extends: base/flux1.yaml" in (shell.folder / "flux.yaml").read_text()
    (pipeline,) = shell.json("run", "flux.yaml", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    return "pipelines/flux"


def options(length: int) -> dict[str, Any]:
    given: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 3, "output_type": "np"}
    return {**given, "guidance_scale": 3.5, "max_sequence_length": length}


@pytest.mark.parametrize("length", [256, 512])
def test_an_image_is_diffusers(shell: Shell, built: str, theirs: Any, length: int) -> None:
    latents = torch.randn((1, 16, 8, 12), generator=generator())
    expected = theirs(PROMPT, latents=packed(latents), **options(length)).images
    assert_equal(
        Pipeline.load(shell.folder / built, "cpu")(PROMPT, latents=latents, **options(length)).images, expected
    )


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_black_forest_labs_is_the_transformer_of_a_folder(
    shell: Shell, theirs: Any, prefix: str, tmp_path: Path
) -> None:
    """Of another seed than the folder's, so that the file's weights show."""
    other = open_checkpoint("synthetic:flux1-dev-tiny?seed=9", digests=PlainDigests(), download=False)
    module = load_module("transformer", other.submodels["transformer"].load)
    tensors = {f"{prefix}{name}": tensor for name, tensor in flux_tensors(module).items()}
    save_file(tensors, tmp_path / "bfl.safetensors")
    opened = open_checkpoint(
        str(shell.folder / "model"),
        digests=PlainDigests(),
        download=False,
        components={"transformer": str(tmp_path / "bfl.safetensors")},
    )
    loaded = load_module("transformer", opened.submodels["transformer"].load).state_dict()
    own = module.state_dict()
    assert loaded.keys() == own.keys() and all(torch.equal(loaded[key], own[key]) for key in own)


@pytest.mark.slow
def test_a_pipeline_with_that_file_draws_what_diffusers_draws(shell: Shell, built: str, theirs: Any) -> None:
    text = (shell.folder / "flux.yaml").read_text() + "components: {transformer: bfl.safetensors}\n"
    (shell.folder / "file.yaml").write_text(text)
    (pipeline,) = shell.json("run", "file.yaml", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    latents = torch.randn((1, 16, 8, 12), generator=generator())
    expected = theirs(PROMPT, latents=packed(latents), **options(256)).images
    drawn = Pipeline.load(shell.folder / "pipelines/file", "cpu")(PROMPT, latents=latents, **options(256)).images
    assert_equal(drawn, expected)


@pytest.fixture(scope="module")
def from_gguf(shell: Shell, built: str) -> str:
    """The pipeline with its transformer from one GGUF file, of another seed than the folder's, and its own T5 from another."""
    other = open_checkpoint("synthetic:flux1-dev-tiny?seed=9", digests=PlainDigests(), download=False)
    transformer = load_module("transformer", other.submodels["transformer"].load)
    own = load_module("text_encoder_2", {**other.submodels["text_encoder_2"].load, "seed": 0})
    kinds = mixed(T.Q8_0, T.Q5_0, T.Q4_1, T.BF16)
    write_gguf(shell.folder / "flux1-dev-Q4_K_S.gguf", flux_tensors(transformer), kinds, "flux")
    write_gguf(shell.folder / "t5-encoder-Q8_0.gguf", t5_by_llama_cpp(own.state_dict()), mixed(T.Q8_0), "t5encoder")
    components = "{transformer: flux1-dev-Q4_K_S.gguf, text_encoder_2: t5-encoder-Q8_0.gguf}"
    (shell.folder / "low.yaml").write_text((shell.folder / "flux.yaml").read_text() + f"components: {components}\n")
    shell.json("run", "low.yaml", "--no-evaluate", "--no-verify")
    return "pipelines/low"


def test_a_pipeline_of_gguf_files_generates_what_diffusers_does_with_their_values(
    shell: Shell, from_gguf: str, theirs: Any
) -> None:
    done = shell.run("verify", from_gguf)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {"transformer": "flux1-dev-Q4_K_S.gguf", "text_encoder_2": "t5-encoder-Q8_0.gguf"}
    components = {name: str(shell.folder / file) for name, file in files.items()}
    model = str(shell.folder / "model")
    pipeline = load_pipeline(open_checkpoint(model, digests=PlainDigests(), download=False, components=components))
    pipeline.set_progress_bar_config(disable=True)
    found, expected = flux_tensors(pipeline.transformer), by_gguf(shell.folder / files["transformer"])
    assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
    latents = torch.randn((1, 16, 8, 12), generator=generator())
    images = pipeline(PROMPT, latents=packed(latents), **options(256)).images
    drawn = Pipeline.load(shell.folder / from_gguf, "cpu")(PROMPT, latents=latents, **options(256)).images
    assert_equal(drawn, images)
    assert np.abs(images - theirs(PROMPT, latents=packed(latents), **options(256)).images).max() > 0.01
    assert shell.json("generate", from_gguf, *DRAW)["settings"]["steps"] == 2


def test_inspect_names_gguf_files_and_what_was_built_of_them(shell: Shell, from_gguf: str) -> None:
    said = described(shell, from_gguf)["details"]["dequantized from"]
    assert "transformer: gguf (" in said and "text_encoder_2: gguf (" in said and "Q8_0" in said
    transformer = described(shell, "flux1-dev-Q4_K_S.gguf")
    assert transformer["kind"] == "transformer" and transformer["details"]["architecture in the file"] == "flux"
    assert transformer["details"]["format"] == "gguf" and "Q5_0 (" in transformer["details"]["types"]
    assert "components: {transformer: flux1-dev-Q4_K_S.gguf}" in transformer["workflow"]
    text = described(shell, "t5-encoder-Q8_0.gguf")
    assert "components: {text_encoder" in text["workflow"] and "Q8_0 (" in text["details"]["types"]
    done = shell.run("init", "--model", "flux1-dev-Q4_K_S.gguf", "--out", "written.yaml")
    assert done.returncode == 0, done.stderr
    assert "  transformer: flux1-dev-Q4_K_S.gguf" in (shell.folder / "written.yaml").read_text()


def described(shell: Shell, name: str) -> Any:
    (found,) = shell.json("inspect", name)["findings"]
    return found


def test_diffusers_converter_agrees_on_every_name_and_row_at_the_published_width() -> None:
    """Vectors in place of matrices: each row its number."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    from sdflow.families.flux.transformer import FluxTransformer

    config = {"attention_head_dim": 128, "num_attention_heads": 24, "num_layers": 2, "num_single_layers": 2}
    config |= {"joint_attention_dim": 4096, "pooled_projection_dim": 768, "in_channels": 64, "patch_size": 1}
    model = FluxTransformer()
    shapes = model.parameters({**config, "guidance_embeds": True})
    assert shapes is not None
    places = model.original_names(shapes)
    rows = {place.name: shapes[key][0] * place.parts // place.taken for key, place in places.items()}
    file = {name: 100_000 * index + torch.arange(count) for index, (name, count) in enumerate(rows.items())}
    converted = convert_flux_transformer_checkpoint_to_diffusers(dict(file))
    assert converted.keys() == shapes.keys()
    for key, place in places.items():
        slices = file[place.name].reshape(place.parts, -1)[place.part : place.part + place.taken].flatten()
        assert torch.equal(converted[key], slices.reshape(2, -1).flip(0).flatten() if place.swapped else slices), key


def test_inspect_names_folder_and_file(shell: Shell, built: str) -> None:
    assert "flux1-dev-tiny" in shell.run("inspect", "model").stdout
    found = shell.run("inspect", "bfl.safetensors").stdout
    assert "transformer" in found and "flux1-dev-tiny" in found
    refused = shell.run("plan", "flux.yaml", "--set", f"model={shell.folder / 'bfl.safetensors'}")
    assert refused.returncode != 0 and "components" in refused.stderr and "Traceback" not in refused.stderr


def test_generate_uses_and_records_the_defaults_of_dev(shell: Shell, built: str) -> None:
    settings = shell.json("generate", built, *DRAW)["settings"]
    assert settings["guidance_scale"] == 3.5 and settings["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    with Image.open(shell.folder / "images/001-1.png") as image:
        assert image.size == (48, 64) and json.loads(image.info["sdflow"])["steps"] == 2
    refused = shell.run("generate", built, *DRAW, "--negative-prompt", "blurred")
    assert refused.returncode == 2 and "has no negative prompt" in refused.stderr


@pytest.mark.slow
def test_a_baked_lora_of_kohya_is_verified_and_changes_the_image(shell: Shell, built: str, theirs: Any) -> None:
    """Over fused q, k and v, and in single blocks the first feed-forward layer with them."""
    random, tensors = torch.Generator().manual_seed(5), {}
    for name, weight in flux_tensors(theirs.transformer).items():
        if name.endswith(("qkv.weight", "linear1.weight")):
            stem = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
            tensors[f"{stem}.lora_up.weight"] = torch.randn(len(weight), 2, generator=random)
            tensors[f"{stem}.lora_down.weight"] = torch.randn(2, weight.shape[1], generator=random)
            tensors[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(tensors, shell.folder / "kohya.safetensors")
    given = ("--lora", "kohya.safetensors:0.5", "--out", "baked", "--verify")
    assert shell.json("bake", "--base", built, *given)["pipeline"]["verification"]["passed"]
    for folder, out in (("baked", "with"), (built, "without")):
        shell.json("generate", folder, *DRAW, "--out", out)
    with Image.open(shell.folder / "with/001-1.png") as one, Image.open(shell.folder / "without/001-1.png") as other:
        assert (np.asarray(one) != np.asarray(other)).any()


def test_one_file_takes_the_guidance_scale_and_draws_the_image_of_diffusers(
    shell: Shell, built: str, theirs: Any
) -> None:
    refused = shell.run("export", built, "--one-file", "one.onnx")
    assert refused.returncode == 2 and "--height" in refused.stderr, "its steps depend on the size"
    size = ("--height", "64", "--width", "96", "--schedule", "flow_euler,3")
    shell.json("export", built, "--one-file", "one.onnx", *size)
    latents = torch.randn((1, 16, 8, 12), generator=generator())
    session = onnxruntime.InferenceSession(shell.folder / "one.onnx")
    given = {
        "input_ids": token_ids(theirs.tokenizer, [PROMPT]).int().numpy(),
        "input_ids_2": token_ids(theirs.tokenizer_2, [PROMPT], 512).int().numpy(),
        "latents": latents.numpy(),
        "guidance_scale": np.array([3.5], np.float32),
    }
    (drawn,) = session.run(None, given)
    assert_equal(drawn, theirs(PROMPT, latents=packed(latents), **options(512)).images)


@pytest.mark.slow
def test_bench_holds_both_engines_to_pytorch_and_tune_chooses(shell: Shell, built: str) -> None:
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", built, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}
    tuned = shell.json("tune", built, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"


@pytest.mark.slow
def test_a_server_draws_with_it(shell: Shell, built: str) -> None:
    with running_server(
        str(shell.folder / built), "--batch-sizes", "1", environment=shell.environment(), started=shell.started
    ) as server:
        wanted = {"prompt": "an otter", "size": "64x64", "steps": 2, "response_format": "b64_json"}
        images = []
        for scale in (1.5, 6.0):
            answer = httpx.post(
                f"{server.url}/v1/images/generations",
                json={**wanted, "guidance_scale": scale, "seed": 1},
                timeout=PATIENCE,
            )
            assert answer.status_code == 200, answer.text
            images.append(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        with Image.open(io.BytesIO(images[0])) as one, Image.open(io.BytesIO(images[1])) as other:
            assert one.size == (64, 64) and (np.asarray(one) != np.asarray(other)).any()


@pytest.mark.slow
def test_the_workflow_of_schnell_is_built_and_evaluated(shell: Shell) -> None:
    (pipeline,) = shell.json("run", "flux1_schnell_tiny")["pipelines"]
    assert pipeline["verification"]["passed"]
    settings = shell.json("generate", "pipelines/flux1_schnell_tiny", *DRAW)["settings"]
    assert settings["guidance_scale"] == 0.0
