"""Bind reads any layout of a checkpoint, refuses what does not fit, and leaves nothing half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdflow.errors import CheckpointError, PassError
from sdflow.sources.checkpoint import file_stamp
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.structure import RECIPES_FILE, read_recipes
from sdflow.weights.tensors import open_tensors
from tests.weights.conftest import Builder, config_of, synthetic

Content = Callable[[Path], dict[str, bytes]]
SUBMODEL = "text_encoder"


@pytest.fixture
def structure(built: Builder) -> Path:
    return built.structure(SUBMODEL, "cuda")


@pytest.fixture
def weights(structure: Path) -> dict[str, np.ndarray]:
    """The small text encoder's tensors, by their keys."""
    parameters = read_recipes(structure).parameters
    with open_tensors(SUBMODEL, synthetic(SUBMODEL), parameters) as tensors:
        return {key: tensors.read(key) for key in parameters}


def saved(folder: Path, *shards: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write safetensors files; returns the load of `open_checkpoint`."""
    folder.mkdir()
    files = [folder / f"{index}.safetensors" for index in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file({key: np.ascontiguousarray(value) for key, value in shard.items()}, file)
    return {
        "kind": "files", "config": config_of(SUBMODEL), "pickled": False, "files": [file_stamp(file) for file in files]
    }  # fmt: skip


def bound(structure: Path, load: dict[str, Any], out: Path) -> Path:
    out.mkdir()
    bind(BindRequest(SUBMODEL, structure, load), out)
    return out


def test_files_and_shards_give_what_memory_gives(
    structure: Path, weights: dict[str, np.ndarray], tmp_path: Path, content: Content
) -> None:
    expected = content(bound(structure, synthetic(SUBMODEL), tmp_path / "expected"))
    one = saved(tmp_path / "one", weights)
    half = len(weights) // 2
    items = list(weights.items())
    two = saved(tmp_path / "two", dict(items[:half]), dict(items[half:]))
    prefixed = saved(tmp_path / "prefixed", {f"text_model.{key}": value for key, value in items})
    for name, load in (("a", one), ("b", two), ("c", prefixed)):
        assert content(bound(structure, load, tmp_path / name)) == expected


def test_a_checkpoint_in_float16_gives_what_it_gives_widened(
    structure: Path, weights: dict[str, np.ndarray], tmp_path: Path, content: Content
) -> None:
    half = {key: value.astype(np.float16) for key, value in weights.items()}
    wide = {key: value.astype(np.float32) for key, value in half.items()}
    first = bound(structure, saved(tmp_path / "half", half), tmp_path / "a")
    assert content(first) == content(bound(structure, saved(tmp_path / "wide", wide), tmp_path / "b"))


def test_a_checkpoint_in_bfloat16_gives_what_it_gives_widened(
    structure: Path, weights: dict[str, np.ndarray], tmp_path: Path, content: Content
) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    brain = {key: torch.from_numpy(value).to(torch.bfloat16) for key, value in weights.items()}
    load = saved(tmp_path / "brain", weights)
    save_torch(brain, tmp_path / "brain" / "0.safetensors")
    load["files"] = [file_stamp(tmp_path / "brain" / "0.safetensors")]
    wide = saved(tmp_path / "wide", {key: value.float().numpy() for key, value in brain.items()})
    first = bound(structure, load, tmp_path / "a")
    assert content(first) == content(bound(structure, wide, tmp_path / "b"))


def test_a_checkpoint_that_does_not_fit_is_refused_and_named(
    structure: Path, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    name = next(iter(weights))
    strange = {**weights, "extra.weight": np.zeros(3, np.float32)}
    lacking = {key: value for key, value in weights.items() if key != name}
    bent = {**weights, name: weights[name].reshape(-1)}
    for index, (tensors, message) in enumerate(
        ((strange, "unexpected: extra.weight"), (lacking, f"missing: {name}"), (bent, f"wrong shape: {name}"))
    ):
        with pytest.raises(CheckpointError, match=message):
            bound(structure, saved(tmp_path / f"c{index}", tensors), tmp_path / str(index))


def test_a_checkpoint_that_changed_since_it_was_opened_is_refused(
    structure: Path, weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    load = saved(tmp_path / "files", weights)
    (tmp_path / "files" / "0.safetensors").touch()
    with pytest.raises(CheckpointError, match="has changed"):
        bound(structure, load, tmp_path / "out")


@pytest.mark.parametrize("damage", ["gone", "not JSON", "another format", "no recipe", "another shape"])
def test_a_damaged_structure_is_refused(structure: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "structure"
    shutil.copytree(structure, copy)
    path = copy / RECIPES_FILE
    content = json.loads(path.read_text())
    name = next(iter(content["weights"]))
    if damage == "no recipe":
        del content["weights"][name]
    elif damage == "another shape":
        recipe = content["weights"][name]
        while "of" in recipe:
            recipe = recipe["of"]
        recipe["shape"] = [1]
    content["format"] += damage == "another format"
    path.write_text(path.read_text()[:-40] if damage == "not JSON" else json.dumps(content))
    if damage == "gone":
        path.unlink()
    with pytest.raises(PassError, match=RECIPES_FILE):
        bound(copy, synthetic(SUBMODEL), tmp_path / "out")


def test_a_recipe_that_names_another_weight_changes_the_result(
    structure: Path, tmp_path: Path, content: Content
) -> None:
    """What `sdflow verify` finds by building the same cell with the weights carried."""
    copy = tmp_path / "structure"
    shutil.copytree(structure, copy)
    text = (copy / RECIPES_FILE).read_text()
    swapped = text.replace('"param": "encoder.layers.0.mlp.fc1.bias"', '"param": "encoder.layers.1.mlp.fc1.bias"')
    assert swapped != text
    (copy / RECIPES_FILE).write_text(swapped)
    damaged = bound(copy, synthetic(SUBMODEL), tmp_path / "a")
    sound = bound(structure, synthetic(SUBMODEL), tmp_path / "b")
    assert content(damaged) != content(sound)


def test_a_base_of_another_structure_is_refused(built: Builder, structure: Path, tmp_path: Path) -> None:
    base = built.carried("safety_checker", "cuda")
    (tmp_path / "out").mkdir()
    with pytest.raises(PassError, match="of another structure"):
        bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), base=base), tmp_path / "out")


def test_progress_ends_at_the_whole(structure: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), progress=lambda *at: seen.append(at)), tmp_path)
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)
