"""The commands on Stable Diffusion 3, from the shell, from one build: LoRAs, bake, bench, tune, generate's options and serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from shell import Shell

from sdflow.families.shared.text import token_ids
from sdflow.families.stable_diffusion_3.original_names import sd3_names
from sdflow.runtime.files.folder import load_companions
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources.architectures import architecture_config
from sdflow.sources.load import parameter_shapes

pytestmark = pytest.mark.slow
WORKFLOW = "sd35_tiny"
FOLDER = "pipelines/sd35_tiny"
DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "64", "--threads", "1")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("stable_diffusion_3_commands"))


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", WORKFLOW, "--no-verify", "--no-evaluate")["pipelines"]
    return pipeline


def parameters(submodel: str) -> dict[str, tuple[int, ...]]:
    load = {"config": architecture_config("sd35-tiny", submodel), "family": "stable_diffusion_3"}
    return dict(parameter_shapes(submodel, load))


@pytest.fixture(scope="module")
def lora(shell: Shell) -> Path:
    """Of kohya's scripts: q, k and v of the image's attention in one module, and the first text encoder."""
    random = torch.Generator().manual_seed(5)
    shapes = parameters("transformer")
    places = sd3_names(shapes)
    stems = {
        place.name.removesuffix(".weight"): (place.parts * shapes[key][0], shapes[key][1])
        for key, place in places.items()
        if place.name.endswith("x_block.attn.qkv.weight")
    }
    names = {f"lora_unet_{stem.replace('.', '_')}": shape for stem, shape in stems.items()}
    text = parameters("text_encoder")
    names |= {
        f"lora_te1_text_model_{key.removeprefix('text_model.').removesuffix('.weight').replace('.', '_')}": shape
        for key, shape in text.items()
        if key.endswith("q_proj.weight")
    }
    tensors = {}
    for stem, shape in names.items():
        tensors[f"{stem}.lora_up.weight"] = torch.randn(shape[0], 2, generator=random)
        tensors[f"{stem}.lora_down.weight"] = torch.randn(2, shape[1], generator=random)
        tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    path = shell.folder / "kohya.safetensors"
    save_file(tensors, path)
    return path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def drawn(shell: Shell, folder: str, out: str, *more: str) -> np.ndarray:
    shell.json("generate", folder, *DRAW, *more, "--out", out)
    return pixels(shell.folder / out / "001-1.png")


def test_a_baked_lora_of_kohya_is_verified_against_diffusers_and_changes_the_image(
    shell: Shell, first: Any, lora: Path
) -> None:
    baked = shell.json("bake", "--base", FOLDER, "--lora", f"{lora}:0.5", "--out", "baked", "--verify")["pipeline"]
    assert baked["verification"]["passed"]
    assert (drawn(shell, "baked", "with") != drawn(shell, FOLDER, "without")).any()
    built = [step["step"].split("/")[1] for step in baked["steps"] if step["outcome"] == "built"]
    assert set(built) == {"text_encoder", "transformer"}, "nothing else was written"


def test_bench_holds_both_engines_to_pytorch_and_tune_chooses(shell: Shell, first: Any) -> None:
    """With T5 among PyTorch's modules, which a checkpoint may lack."""
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", FOLDER, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}
    tuned = shell.json("tune", FOLDER, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"


def test_clip_skip_and_a_second_prompt_change_the_image_and_are_noted(shell: Shell, first: Any) -> None:
    plain = drawn(shell, FOLDER, "plain")
    assert (drawn(shell, FOLDER, "skipped", "--clip-skip", "1") != plain).any()
    assert (drawn(shell, FOLDER, "second", "--prompt-2", "oil on canvas") != plain).any()
    with Image.open(shell.folder / "skipped/001-1.png") as image:
        assert json.loads(image.info["sdflow"])["clip_skip"] == 1


def test_an_image_and_a_mask_are_drawn_into(shell: Shell, first: Any) -> None:
    Image.new("RGB", (64, 64), (200, 30, 90)).save(shell.folder / "image.png")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 64, 32))
    mask.save(shell.folder / "mask.png")
    given = ("--image", "image.png", "--strength", "0.9")
    into = drawn(shell, FOLDER, "masked", *given, "--mask", "mask.png")
    assert (into[32:] == (200, 30, 90)).all() and (into[:32] != (200, 30, 90)).any()
    assert (drawn(shell, FOLDER, "from_image", *given)[32:] != (200, 30, 90)).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt-syntax", "a1111"), "reads prompts as they are"),
        (("--scheduler", "ddim"), "flow_euler"),
        (("--clip-skip", "99"), "cannot be skipped"),
    ],
)
def test_what_it_does_not_take_is_refused_in_words(
    shell: Shell, first: Any, options: tuple[str, ...], words: str
) -> None:
    done = shell.run("generate", FOLDER, *DRAW, *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_one_file_draws_the_image_of_the_folder(shell: Shell, first: Any) -> None:
    """Any size: the shift of this scheduler does not depend on it."""
    shell.json("export", FOLDER, "--one-file", "one.onnx", "--schedule", "flow_euler,2")
    session = onnxruntime.InferenceSession(shell.folder / "one.onnx")
    told = json.loads((shell.folder / "one.onnx.json").read_text())
    companions = load_companions(shell.folder / FOLDER)
    given: dict[str, Any] = {"guidance_scale": np.array([7.0], np.float32)}
    for name in (each.name for each in session.get_inputs() if "input_ids" in each.name):
        text = "blurred" if name.startswith("negative_") else "an otter"
        of_prompt = name.removeprefix("negative_")
        tokenizer = companions[of_prompt.replace("input_ids", "tokenizer")]
        given[name] = token_ids(tokenizer, [text], told["tokenizers"][of_prompt]["length"]).int().numpy()
    latents = torch.randn((1, 16, 8, 6), generator=torch.Generator().manual_seed(3))
    (drawn,) = session.run(["images"], {**given, "latents": latents.numpy()})
    folder = Pipeline.load(shell.folder / FOLDER, "cpu")
    options: dict[str, Any] = {"negative_prompt": "blurred", "num_inference_steps": 2, "height": 64, "width": 48}
    options["guidance_scale"] = 7.0
    expected = folder("an otter", latents=latents, output_type="np", **options).images
    assert drawn.std() > 0.05 and np.abs(drawn - expected).max() < 1e-4


def test_one_file_with_text_is_refused_in_words(shell: Shell, first: Any) -> None:
    done = shell.run("export", FOLDER, "--one-file", "text.onnx", "--text")
    assert done.returncode == 2 and "its tokenizer is not CLIP's" in done.stderr and "Traceback" not in done.stderr
    assert not (shell.folder / "text.onnx").exists()
