"""`sdflow generate` from the shell: the files it leaves, what they tell, and how it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from started_python import ROOT, Command

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.runtime import generate as generate_module
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files.image_text import SETTINGS
from sdflow.runtime.generate import Progress, generate

SMALL: dict[str, Any] = {"height": 64, "width": 64, "steps": 2, "target": "cpu", "threads": 1}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a PNG file of an image."""
    with Image.open(path) as image:
        settings: dict[str, Any] = json.loads(image.info[SETTINGS])
    return settings


@pytest.fixture(scope="module")
def pipeline_folder(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline, with its target in the manifest."""
    folder = tmp_path_factory.mktemp("generate") / "tiny"
    folder.mkdir()
    for path in tiny_pipeline.iterdir():
        (folder / path.name).symlink_to(path, target_is_directory=path.is_dir())
    (folder / "sdflow.json").unlink()
    manifest = json.loads((tiny_pipeline / "sdflow.json").read_text())
    (folder / "sdflow.json").write_text(json.dumps({**manifest, "target": "cpu"}))
    return folder


def test_images_are_files_that_tell_how_to_draw_them_again(
    pipeline_folder: Path, tmp_path: Path, sdflow: Command
) -> None:
    (tmp_path / "prompts.txt").write_text("a horse\n\na cow\n")
    arguments = ["--prompts", "prompts.txt", "--images", "2", "--seed", "7", "--steps", "2", "--height", "64",
                 "--width", "64", "--scheduler", "euler_a", "--batch", "3", "--threads", "1", "--json"]  # fmt: skip
    done = sdflow("generate", str(pipeline_folder), *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["format_version"], result["kind"]) == (1, "generate")
    files = [Path(each["file"]).name for each in result["images"]]
    assert files == ["001-7.png", "002-8.png", "003-9.png", "004-10.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [*files, "sheet.png"]
    assert "image 1-3 of 4: step 2 of 2" in done.stderr
    settings = read_settings(tmp_path / "images/003-9.png")
    assert (settings["prompt"], settings["seed"], settings["steps"]) == ("a cow", 9, 2)
    assert settings["scheduler"] == "EulerAncestralDiscreteScheduler"
    # Alone, from what its file tells, the third image comes out the same.
    request = GenerateRequest(
        pipeline_folder, [settings["prompt"]], tmp_path / "again", seed=settings["seed"], scheduler="euler_a", **SMALL
    )
    again = generate(request).images[0].file
    before, after = (np.asarray(Image.open(path), int) for path in (tmp_path / "images/003-9.png", again))
    assert before.std() > 10
    assert np.abs(before - after).max() <= 1


def test_a_process_that_draws_imports_no_compiler_and_no_other_schedulers(
    pipeline_folder: Path, tmp_path: Path
) -> None:
    """torch.compile's modules take longer to import than diffusers. Only the safety checker's image processor needs them, and
    accelerate: both come with transformers' models. Afterwards, torch.compile still works."""
    arguments = ["generate", str(pipeline_folder), "--prompt", "a horse", "--no-safety-checker", "--steps", "1",
                 "--height", "64", "--width", "64", "--threads", "1"]  # fmt: skip
    code = f"""
import sys, sdflow.cli
sys.argv = ["sdflow", *{arguments!r}]
try:
    sdflow.cli.main()
except SystemExit as end:
    assert not end.code
print("imported", *sys.modules)
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("imported ")[2].split())
    assert {"diffusers", "onnxruntime", "torch"} <= loaded
    unneeded = {
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "transformers.modeling_utils",
        "accelerate",
        "peft",
        "pandas",
        "scipy.stats",
        "transformers.models.auto",
        "torchsde",
        "diffusers.schedulers.scheduling_ddim",
    }
    assert not unneeded & loaded
    assert len([*(tmp_path / "images").iterdir()]) == 1


def test_sessions_are_created_early_only_for_a_text_of_the_usual_length(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The denoiser for another length would be a second one, with weights of its own on the CPU."""

    def first(**more: Any) -> Any:
        return generate_module._first(GenerateRequest(pipeline_folder, ["a horse"], tmp_path, **SMALL, **more))

    assert first() == {"height": 64, "width": 64, "guidance_scale": None}
    assert first(prompt_syntax="a1111") is None and first(clip_skip=1) is None
    short = {"more": {"max_sequence_length": 64}}
    assert first(**short) is not None, "Stable Diffusion has one length"
    monkeypatch.setattr(generate_module, "folder_family", lambda folder: FAMILIES["flux"])
    assert first() is not None and first(**short) is None


def test_the_file_tells_the_image_and_the_mask_and_every_step_is_told(pipeline_folder: Path, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype("uint8")
    Image.fromarray(image).save(tmp_path / "image.png")
    mask = np.zeros((64, 64), "uint8")
    mask[:, 32:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    told: list[tuple[str, int, int]] = []
    drawn = {}
    for name, part in (("all", None), ("half", tmp_path / "mask.png")):
        request = GenerateRequest(
            pipeline_folder, ["a horse"], tmp_path / name, seed=1, image=tmp_path / "image.png", mask=part, strength=0.9,
            **{**SMALL, "steps": 4},
        )  # fmt: skip
        result = generate(request, Progress(step=lambda *step: told.append(step)))
        drawn[name] = read_settings(Path(result.images[0].file))
        assert result.sheet is None, "one image needs no contact sheet"
    total = told[-1][2]
    assert told == [("1 of 1", done, total) for done in range(1, total + 1)] * 2
    assert drawn["half"]["mask"]["name"] == "mask.png"
    assert "mask" not in drawn["all"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "no prompt was given"),
        (["-p", "a", "--scheduler", "eulr"], "did you mean 'euler'"),
        (["-p", "a", "--mask", "x.png"], "a mask requires an image"),
        (["-p", "a", "--strength", "0.5"], "Add --image FILE"),
        (["-p", "a", "--image", "x.png"], "x.png: cannot be read as an image"),
        (["-p", "a", "--target", "cudda"], "no target is named cudda"),
        (["-p", "a", "--guidance-scale", "nan"], "less than or equal to 1000"),
        (["-p", "a", "--image", "x.png", "--strength", "2"], "less than or equal to 1"),
        (["-p", "a", "--out", "file/images"], "file: not a folder"),
        (["--prompts", "missing.txt"], "missing.txt: cannot be read"),
        (["-p", "a", "--height", "100"], "height is 100 pixels"),
        (["-p", "a", "--out", "file"], "file: not a folder"),
        (["-p", "a", "--prompt-syntax", "a111"], "--prompt-syntax: invalid value 'a111'"),
        (["-p", "a", "--embedding", "missing.pt"], "missing.pt: no such file"),
        (["-p", "a", "--embedding", "file"], "the file type '' is unknown"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_place_and_remedy(
    pipeline_folder: Path, tmp_path: Path, sdflow: Command, arguments: list[str], what: str
) -> None:
    (tmp_path / "file").write_text("")
    done = sdflow("generate", str(pipeline_folder), *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_prompts_with_weights_learned_words_and_clip_skip_are_drawn_and_told(
    pipeline_folder: Path, tmp_path: Path, sdflow: Command
) -> None:
    save_file({"emb_params": torch.ones(2, 32)}, tmp_path / "my-style.safetensors")
    torch.save({"string_to_param": {"*": torch.ones(1, 32)}, "name": "x"}, tmp_path / "bad-hands.pt")
    arguments = ["-p", "a (horse:1.3) in My-Style BREAK a moon", "--negative-prompt", "(ugly)", "--seed", "7", "--steps", "2",
                 "--height", "64", "--width", "64", "--threads", "1", "--prompt-syntax", "a1111", "--clip-skip", "1",
                 "--embedding", "my-style.safetensors", "--embedding", "bad-hands.pt:ugly", "--allow-pickle"]  # fmt: skip
    done = sdflow("generate", str(pipeline_folder), *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = read_settings(tmp_path / "images/001-7.png")
    assert (settings["prompt_syntax"], settings["clip_skip"]) == ("a1111", 1)
    assert {word: each["name"] for word, each in settings["embeddings"].items()} == {
        "my-style": "my-style.safetensors", "ugly": "bad-hands.pt"
    }  # fmt: skip
    again = GenerateRequest(
        pipeline_folder, ["a horse"], tmp_path / "again", embeddings=[str(tmp_path / "my-style.safetensors")], **SMALL
    )
    with pytest.raises(UsageError, match="no prompt contains 'my-style'"):
        generate(again)
    twice = [str(tmp_path / "my-style.safetensors"), f"{tmp_path / 'my-style.safetensors'}:MY-STYLE"]
    with pytest.raises(UsageError, match="already stands for .*my-style.safetensors"):
        generate(replace(again, prompts=["my-style"], embeddings=twice))


def test_a_target_that_is_not_here_ends_with_status_5(pipeline_folder: Path, tmp_path: Path, sdflow: Command) -> None:
    done = sdflow("generate", str(pipeline_folder), "-p", "a", "--target", "cuda", folder=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "built without CUDAExecutionProvider" in done.stderr


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path: Path, sdflow: Command) -> None:
    done = sdflow("generate", ".", "-p", "a", folder=tmp_path)
    assert done.returncode == 2
    assert "not an sdflow pipeline" in done.stderr


def _tokenizer_is_gone(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")


def _sdflow_json(**changed: str | None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "sdflow.json").read_text()) | changed
        kept = {name: value for name, value in manifest.items() if value is not None}
        (folder / "sdflow.json").write_text(json.dumps(kept))

    return damage


def _written_over(file: str, content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / file).write_text(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_tokenizer_is_gone, r"tokenizer/\S+ is missing"),
        (_sdflow_json(target=None), "is not a valid manifest: target: field required"),
        (_sdflow_json(target="cudda"), "sdflow.json: no target is named cudda"),
        (_written_over("model_index.json", "{"), "model_index.json: cannot be read"),
        (_written_over("unet/config.json", "{}"), "has no entry 'block_out_channels'"),
        (_written_over("scheduler/scheduler_config.json", "{"), "scheduler_config.json: cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused_with_what_is_wrong(
    pipeline_folder: Path, tmp_path: Path, damage: Callable[[Path], None], what: str
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in pipeline_folder.iterdir():
        if path.name in ("vae_decoder", "vae_encoder", "text_encoder", "safety_checker"):
            (folder / path.name).symlink_to(path.resolve(), target_is_directory=True)
        elif path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(path, folder / path.name)
    damage(folder)
    request = {name: value for name, value in SMALL.items() if name != "target"}
    with pytest.raises(UsageError, match=what):
        generate(GenerateRequest(folder, ["a horse"], tmp_path / "images", **request))
    assert not (tmp_path / "images").exists()
