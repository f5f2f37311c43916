"""A pipeline folder that is damaged is told as that, and nothing is drawn with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.errors import UsageError, VerificationError
from sdflow.manifest import read_manifest
from sdflow.runtime.denoiser.schedule import trace
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files import soundness
from sdflow.runtime.files.folder import load_companions, submodel_config
from sdflow.runtime.files.soundness import require_sound
from sdflow.runtime.generate import generate
from sdflow.runtime.sessions.session import read_graph
from sdflow.serve.http.served_model import read_served

SMALL: dict[str, Any] = {"height": 64, "width": 64, "steps": 1, "target": "cpu", "threads": 1}


@pytest.fixture
def folder(tiny_pipeline: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pipeline, whose manifest has the digests of its files."""
    return Path(shutil.copytree(tiny_pipeline, tmp_path / "tiny"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def drawn(folder: Path, **options: Any) -> None:
    generate(GenerateRequest(folder, ["a horse"], folder.parent / "images", seed=1, **SMALL, **options))


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_a_flipped_bit_is_found(folder: Path, file: str) -> None:
    path = folder / "vae_decoder" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x04
    path.write_bytes(content)
    with pytest.raises(
        VerificationError, match=f"vae_decoder/{file}: its content differs from what was built\n.*--no-check"
    ):
        drawn(folder)
    assert not (folder.parent / "images").exists()


def test_a_damaged_folder_is_not_served(folder: Path) -> None:
    with (folder / "text_encoder/model.onnx.data").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(
        VerificationError, match=r"text_encoder/model\.onnx\.data: its content differs from what was built"
    ):
        read_served(folder)
    assert read_served(folder, check=False).folder == folder


def test_without_the_check_it_is_drawn_all_the_same(folder: Path) -> None:
    path = folder / "vae_decoder/model.onnx.data"
    weights = np.fromfile(path, np.float32)
    weights[5] += 1e-3
    weights.tofile(path)
    drawn(folder, check=False)
    assert (folder.parent / "images/001-1.png").exists()


def test_what_did_not_change_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("sdflow.store.stat_cache.SETTLED_NS", -(10**18))  # the time of the last change cannot be set
    read: list[Path] = []

    def digest(path: Path) -> str:
        from sdflow.digest import digest_file

        read.append(path)
        return digest_file(path)

    monkeypatch.setattr("sdflow.store.stat_cache.digest_file", digest)
    monkeypatch.setattr(soundness, "digest_file", digest)
    manifest = read_manifest(folder)
    require_sound(folder, manifest, ["unet", "vae_decoder"])
    first = len(read)
    require_sound(folder, manifest, ["unet", "vae_decoder"])
    assert first == len(read) > 4
    (folder / "unet/config.json").write_text("{}")
    with pytest.raises(VerificationError, match="unet/config.json"):
        require_sound(folder, manifest, ["unet", "vae_decoder"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_image_that_is_not_finite_is_no_image(folder: Path, value: float) -> None:
    path = folder / "vae_decoder/model.onnx.data"
    weights = np.fromfile(path, np.float32)
    weights[len(weights) // 2 :] = value
    weights.tofile(path)
    with pytest.raises(VerificationError, match=r"no image: [\d,]+ of 12,288 output values of the vae_decoder"):
        drawn(folder, check=False)
    assert not (folder.parent / "images").exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"<html>"])
def test_what_is_no_model_is_told(folder: Path, content: bytes) -> None:
    (folder / "unet/model.onnx").write_bytes(content)
    with pytest.raises(VerificationError, match=r"unet/model.onnx: is not an ONNX model\n.*rebuild the pipeline"):
        read_graph(folder / "unet/model.onnx")
    with pytest.raises(VerificationError, match="unet/model.onnx: is not an ONNX model"):
        drawn(folder, check=False)


def test_a_data_file_that_is_cut_off_is_told(folder: Path) -> None:
    os.truncate(folder / "unet/model.onnx.data", 3000)
    with pytest.raises(
        VerificationError, match=r"conv_in.weight ends at byte [\d,]+ of model.onnx.data, which has 3,000"
    ):
        drawn(folder, check=False)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("location", "/etc/passwd", "are outside its folder"),
        ("location", "../unet/model.onnx.data", "are outside its folder"),
        ("offset", "x", "location of the data of"),
        ("offset", "-5", "start before the file's beginning"),
        ("length", str(2**63), "ends at byte"),
    ],
)
def test_data_of_a_model_lie_in_its_folder(folder: Path, key: str, value: str, says: str) -> None:
    model = onnx.load(str(folder / "text_encoder/model.onnx"), load_external_data=False)
    tensor = next(each for each in model.graph.initializer if each.external_data)
    next(entry for entry in tensor.external_data if entry.key == key).value = value
    (folder / "text_encoder/model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(VerificationError, match=says):
        read_graph(folder / "text_encoder/model.onnx")


def test_an_entry_that_a_config_lacks_is_named(folder: Path) -> None:
    edit(folder / "text_encoder/config.json", max_position_embeddings=...)
    with pytest.raises(UsageError, match=r"text_encoder/config.json: has no entry 'max_position_embeddings'\n"):
        drawn(folder, check=False)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -5, 0, 10**12, 2.5, True])
def test_a_size_that_is_none_is_told(folder: Path, value: Any) -> None:
    edit(folder / "text_encoder/config.json", max_position_embeddings=value)
    with pytest.raises(UsageError, match="text_encoder/config.json: its max_position_embeddings is"):
        submodel_config(folder, "text_encoder")


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("tokenizer/tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer/tokenizer_config.json", {"model_max_length": -5}),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 10**12}),
        ("tokenizer/tokenizer_config.json", {"added_tokens_decoder": "x"}),
        ("scheduler/scheduler_config.json", {"beta_end": "x"}),
        ("scheduler/scheduler_config.json", {"_class_name": ["x"]}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": {"a": 1}}),
        ("feature_extractor/preprocessor_config.json", {"size": {"shortest_edge": 10**9}}),
        ("feature_extractor/preprocessor_config.json", {"image_mean": "x"}),
    ],
)
def test_a_companion_of_wrong_types_is_told(folder: Path, file: str, entries: dict[str, Any]) -> None:
    edit(folder / file, **entries)
    with pytest.raises(UsageError, match=f"(?s){file.split('/')[0]}: .*\n.*rebuild the pipeline"):
        load_companions(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a": "b"}'])
@pytest.mark.parametrize("file", ["vocab.json", "merges.txt"])
def test_a_vocabulary_that_is_none_is_told(folder: Path, file: str, content: bytes) -> None:
    if file == "merges.txt" and not content:
        return  # a tokenizer without merges is one
    (folder / "tokenizer" / file).write_bytes(content)
    with pytest.raises(UsageError, match="tokenizer: cannot be loaded"):
        load_companions(folder)


@pytest.mark.parametrize("entries", [{"prediction_type": "x"}, {"timestep_spacing": "x"}, {"trained_betas": [0.1]}])
def test_what_a_scheduler_refuses_when_it_steps_is_told(folder: Path, entries: dict[str, Any]) -> None:
    edit(folder / "scheduler/scheduler_config.json", **entries)
    scheduler = load_companions(folder)["scheduler"]
    with pytest.raises(UsageError, match=r"cannot run 2 steps: .*\n.*--scheduler"):
        trace(scheduler, 2)


def test_nobody_draws_a_billion_steps(folder: Path) -> None:
    """Their table would take exabytes."""
    scheduler = load_companions(folder)["scheduler"]
    with pytest.raises(UsageError, match="1,000,000,000 steps need a table of"):
        trace(scheduler, 10**9)
