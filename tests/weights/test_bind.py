"""Bind reads any layout of a checkpoint, refuses what does not fit, and leaves nothing half done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdflow.digest import digest_file
from sdflow.disk.file_stamp import file_stamp
from sdflow.errors import CheckpointError, DamagedBase, PassError
from sdflow.onnx_model.stub import is_stub
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.structure import PARAMETERS_FILE, read_parameters
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
    parameters = read_parameters(structure)
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


@pytest.mark.parametrize("damage", ["gone", "not JSON", "a parameter less"])
def test_damaged_shapes_of_the_parameters_are_refused(structure: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "structure"
    shutil.copytree(structure, copy)
    path = copy / PARAMETERS_FILE
    if damage == "gone":
        path.unlink()
    elif damage == "not JSON":
        path.write_text(path.read_text()[:-40])
    else:
        shapes = json.loads(path.read_text())
        del shapes["encoder.layers.0.mlp.fc1.bias"]
        path.write_text(json.dumps(shapes))
    with pytest.raises(PassError, match=r"parameters\.json|encoder.layers.0.mlp.fc1.bias"):
        bound(copy, synthetic(SUBMODEL), tmp_path / "out")


def damaged_recipe(structure: Path, copy: Path, damage: Callable[[str], str]) -> Path:
    """A copy of a structure in which the recipe of one stub is another."""
    import onnx

    shutil.copytree(structure, copy)
    model = onnx.load(str(copy / "model.onnx"), load_external_data=False)
    stub = next(
        tensor
        for tensor in model.graph.initializer
        if is_stub(tensor) and any("encoder.layers.0.mlp.fc1.bias" in entry.value for entry in tensor.external_data)
    )
    for entry in stub.external_data:
        if entry.key == "recipe":
            changed = damage(entry.value)
            assert changed != entry.value
            entry.value = changed
    (copy / "model.onnx").write_bytes(model.SerializeToString())
    return copy


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[:-5], id="not JSON"),
        pytest.param(lambda text: text.replace("param", "parma"), id="no recipe"),
        pytest.param(lambda text: text.replace('"shape":[', '"shape":[2,'), id="another shape"),
        pytest.param(lambda text: text.replace("fc1.bias", "fc3.bias"), id="no such parameter"),
    ],
)
def test_a_damaged_recipe_is_refused(structure: Path, tmp_path: Path, damage: Callable[[str], str]) -> None:
    with pytest.raises(PassError, match=r"model\.onnx.*recipe"):
        bound(damaged_recipe(structure, tmp_path / "structure", damage), synthetic(SUBMODEL), tmp_path / "out")


def test_a_recipe_that_names_another_weight_changes_the_result(
    structure: Path, tmp_path: Path, content: Content
) -> None:
    """Nothing but the digest of the artifact, or a build with the weights carried, can tell."""
    copy = damaged_recipe(structure, tmp_path / "structure", lambda text: text.replace("layers.0", "layers.1"))
    damaged = bound(copy, synthetic(SUBMODEL), tmp_path / "a")
    sound = bound(structure, synthetic(SUBMODEL), tmp_path / "b")
    assert content(damaged) != content(sound)


def test_a_base_of_another_structure_is_refused(built: Builder, structure: Path, tmp_path: Path) -> None:
    base = built.carried("safety_checker", "cuda")
    (tmp_path / "out").mkdir()
    with pytest.raises(PassError, match="to another structure"):
        bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), base=base), tmp_path / "out")


def test_progress_ends_at_the_whole(structure: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), progress=lambda *at: seen.append(at)), tmp_path)
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_the_digest_that_is_told_is_that_of_the_file_and_the_base_is_held_to_its_own(
    structure: Path, tmp_path: Path, content: Content
) -> None:
    told: dict[str, str] = {}
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), hashed=told.__setitem__), base)
    assert told == {"model.onnx.data": digest_file(base / "model.onnx.data")}
    sha256 = told["model.onnx.data"]
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), base=base, base_sha256=sha256), out)
    assert content(out) == content(base)
    shutil.rmtree(out)
    out.mkdir()
    told.clear()
    with (base / "model.onnx.data").open("r+b") as data:
        data.write(b"bits")
    with pytest.raises(DamagedBase):
        bind(
            BindRequest(
                SUBMODEL, structure, synthetic(SUBMODEL), base=base, base_sha256=sha256, hashed=told.__setitem__
            ),
            out,
        )
    assert told == {}


def test_a_base_whose_sums_are_known_is_held_to_them_and_not_hashed(
    structure: Path, tmp_path: Path, content: Content
) -> None:
    told: list[tuple[str, str | None]] = []
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), summed=lambda *sums: told.append(sums)), base)
    ((sums, none),) = told
    assert none is None

    def again(**wanted: str) -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        bind(
            BindRequest(
                SUBMODEL, structure, synthetic(SUBMODEL), base=base, summed=lambda *sums: told.append(sums), **wanted
            ),
            out,
        )

    again(base_sha256="0" * 64, base_sums=sums)
    assert content(out) == content(base)
    again(base_sha256=digest_file(base / "model.onnx.data"))
    assert told[1:] == [(sums, None), (sums, sums)], "of a base that was hashed they are told"
    with (base / "model.onnx.data").open("r+b") as data:
        data.seek(-1, os.SEEK_END)
        last = data.read(1)
        data.seek(-1, os.SEEK_END)
        data.write(bytes([last[0] ^ 128]))
    with pytest.raises(DamagedBase):
        again(base_sha256="0" * 64, base_sums=sums)


def test_a_base_of_which_little_would_be_copied_is_not_read(
    structure: Path, tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying it would take longer than computing the rest."""
    monkeypatch.setattr("sdflow.weights.bind.LEAST_COPIED", 1.01)
    (base := tmp_path / "base").mkdir()
    (out := tmp_path / "out").mkdir()
    first = bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL)), base)
    told: list[tuple[str, str | None]] = []
    request = BindRequest(SUBMODEL, structure, synthetic(SUBMODEL), base=base, summed=lambda *sums: told.append(sums))
    assert bind(replace(request, base_sha256="0" * 64), out)["computed"] == first["computed"]
    assert content(out) == content(base)
    assert told[0][1] is None
    shutil.rmtree(out)
    out.mkdir()
    assert bind(request, out)["computed"] < first["computed"], "unless nothing needs to be verified"
