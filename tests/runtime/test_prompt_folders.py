"""Folders that users of A1111's webui have: textual inversion files named in prompts, and wildcards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.errors import CheckpointError, UsageError
from sdflow.prompts.reading import Reading
from sdflow.runtime.files.image_text_reading import read_image_settings
from sdflow.runtime.files.words import read_words
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources.embedding import embeddings_in

SMALL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2}
WIDTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two for the tiny pipeline, one in a folder of its own; one of another model, and a pickled one."""
    made = tmp_path_factory.mktemp("embeddings")
    (made / "styles").mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, width in (("Bad-Hands", WIDTH), ("styles/my-style", WIDTH), ("xl-only", 1280)):
        save_file({"emb_params": torch.randn(2, width, generator=generator)}, made / f"{name}.safetensors")
    torch.save({"string_to_param": {"*": torch.ones(1, WIDTH)}}, made / "old.pt")
    return made


def test_files_go_by_their_names_and_only_those_in_prompts_are_read(folder: Path, tmp_path: Path) -> None:
    assert sorted(embeddings_in(folder)) == ["Bad-Hands", "my-style", "old", "xl-only"]
    texts = ["a cat in MY-STYLE", "(bad-hands:1.2), text"]
    words = read_words([], texts, Reading("a1111"), folder=folder, allow_pickle=False)
    assert sorted(word.word for word in words) == ["Bad-Hands", "my-style"]
    named = read_words([f"{folder / 'old.pt'}:my-style"], texts, Reading(), folder=folder, allow_pickle=True)
    assert {word.word: word.path.name for word in named} == {"my-style": "old.pt", "Bad-Hands": "Bad-Hands.safetensors"}
    with pytest.raises(CheckpointError, match="is pickled"):
        read_words([], ["old"], Reading(), folder=folder, allow_pickle=False)
    save_file({"emb_params": torch.ones(1, WIDTH)}, tmp_path / "old.safetensors")
    torch.save({}, tmp_path / "old.pt")
    assert embeddings_in(tmp_path)["old"].suffix == ".safetensors"
    (tmp_path / "more").mkdir()
    save_file({"emb_params": torch.ones(1, WIDTH)}, tmp_path / "more/OLD.safetensors")
    with pytest.raises(UsageError, match="already stands for .*"):
        embeddings_in(tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        embeddings_in(tmp_path / "absent")


def test_a_pipeline_takes_a_folder_and_leaves_out_what_is_for_other_models(folder: Path, tiny_pipeline: Path) -> None:
    with pytest.warns(UserWarning) as warned:
        pipe = Pipeline.load(tiny_pipeline, "cpu", threads=1, embeddings=[folder])
    left_out = [str(each.message) for each in warned if "skipped" in str(each.message)]
    assert len(left_out) == 2 and "old.pt" in left_out[0] and "1280 wide" in left_out[1]
    assert sorted(pipe.words) == ["Bad-Hands", "my-style"]
    file = folder / "styles/my-style.safetensors"
    alone = Pipeline.load(tiny_pipeline, "cpu", threads=1, embeddings=[file])
    plain = Pipeline.load(tiny_pipeline, "cpu", threads=1)
    drawn = [
        each("a cat in my-style", generator=[torch.Generator().manual_seed(1)], **SMALL).images[0]
        for each in (pipe, alone, plain)
    ]
    pixels = [np.asarray(image, int) for image in drawn]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1 < np.abs(pixels[0] - pixels[2]).max()
    assert json.loads(drawn[0].info["sdflow"])["embeddings"] == {"my-style": {}}


def test_generate_resolves_wildcards_by_seed_and_writes_what_was_drawn(
    folder: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/color.txt").write_text("red\nblue\ngreen in my-style\n")
    command = ["generate", tiny_pipeline, "-p", "a __color__ circle", "--negative-prompt", "__color__", "--images", "4",
               "--batch", "2", "--seed", "0", "--steps", "1", "--height", "64", "--width", "64", "--threads", "1",
               "--embeddings", folder, "--wildcards", tmp_path / "cards", "--out", tmp_path / "out"]  # fmt: skip
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    found = [read_image_settings(path) for path in sorted((tmp_path / "out").glob("0*.png"))]
    assert [(each.seed, each.prompt) for each in found] == [
        (0, "a green in my-style circle"), (1, "a blue circle"), (2, "a red circle"), (3, "a blue circle")
    ]  # fmt: skip
    assert {each.settings["negative_prompt"] for each in found} <= {"red", "blue", "green in my-style"}
    with Image.open(tmp_path / "out/001-0.png") as image:
        said = json.loads(image.info["sdflow"])
        assert said["embeddings"]["my-style"]["name"] == "my-style.safetensors"
        assert image.info["parameters"].startswith("a green in my-style circle\n")
