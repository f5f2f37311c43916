"""Checkpoints of strangers: whatever is wrong with a file is told in words, at once, and nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdflow.errors import CheckpointError
from sdflow.families import DEFAULT, FAMILIES
from sdflow.sources import Checkpoint, PlainDigests, load_module, open_checkpoint
from sdflow.sources.load import load_companion
from sdflow.sources.safetensors_file import read_header

UNET = "unet/diffusion_pytorch_model.safetensors"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def opened(path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(str(path), digests=PlainDigests(), download=False, **options)


def edit(file: Path, **changes: Any) -> None:
    """Python's writer puts NaN and Infinity as they are."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("dtype", [["F16"], {"F16": 1}, None, 5, "F" * 1000])
def test_a_dtype_of_any_json_is_told(folder: Path, dtype: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        header["conv_in.bias"]["dtype"] = dtype

    with_header(folder / UNET, change)
    with pytest.raises(CheckpointError, match="not a valid safetensors file: tensor conv_in.bias") as raised:
        read_header(folder / UNET)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("config", ["unet", "vae", "text_encoder"])
def test_a_number_that_is_none_is_told(folder: Path, config: str, number: float) -> None:
    edit(folder / config / "config.json", norm_eps=number, layer_norm_eps=number, scaling_factor=number)
    with pytest.raises(CheckpointError, match="config.json: not valid JSON|does not make|finite"):
        load_module({"unet": "unet", "vae": "vae_decoder"}.get(config, config), opened(folder).submodels[
            {"unet": "unet", "vae": "vae_decoder"}.get(config, config)
        ].load)  # fmt: skip


def test_a_square_sample_size_may_be_two_numbers(folder: Path) -> None:
    size = json.loads((folder / "unet/config.json").read_text())["sample_size"]
    expected = opened(folder).facts
    edit(folder / "unet/config.json", sample_size=[size, size])
    assert opened(folder).facts == expected


@pytest.mark.parametrize("size", [[16, 24], [16], [], "16", {"a": 1}, None, -16, 0, 10**12])
def test_any_other_sample_size_is_told(folder: Path, size: Any) -> None:
    edit(folder / "unet/config.json", sample_size=size)
    with pytest.raises(CheckpointError, match="unet.*sample_size|sample_size"):
        opened(folder)


@pytest.mark.parametrize("keys", [[1, 2], [b"a"], [("a", 1)], [None]])
def test_a_pickle_whose_keys_are_no_text_is_told(folder: Path, tmp_path: Path, keys: list[Any]) -> None:
    torch.save({"state_dict": {key: torch.zeros(1) for key in keys}}, tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match="not a pickle") as raised:
        opened(tmp_path / "model.ckpt", allow_pickle=True)
    assert "weights_only=False" not in str(raised.value)


@pytest.mark.parametrize("name", ["x" * 1000 + ".safetensors", "a\0b.safetensors", "..", ""])
def test_a_shard_of_any_name_is_told(folder: Path, name: str) -> None:
    (folder / UNET).unlink()
    index = {"weight_map": {"conv_in.bias": name}}
    (folder / f"{UNET}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="shard") as raised:
        opened(folder)
    assert len(str(raised.value)) < 500


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(os.name == "nt", reason="there are none")
@pytest.mark.parametrize("other", [_pipe, _socket, _device])
@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "unet/config.json",
        UNET,
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_pipe_a_socket_or_a_device_is_never_opened(folder: Path, name: str, other: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    other(folder / name)
    with pytest.raises(CheckpointError, match=Path(name).name.split(".")[0]):
        opened(folder)


@pytest.mark.skipif(os.name == "nt", reason="there are none")
@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ""])
def test_a_pipe_in_place_of_a_checkpoint_is_told(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"model{suffix}")
    with pytest.raises(CheckpointError, match="a pipe, a socket or a device"):
        opened(tmp_path / f"model{suffix}", allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n", "git-lfs"),
        (b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>", "web page"),
        (b"", "empty"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_what_came_in_place_of_the_weights_is_named(tmp_path: Path, suffix: str, content: bytes, what: str) -> None:
    (tmp_path / f"model{suffix}").write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        opened(tmp_path / f"model{suffix}", allow_pickle=True)


HUGE = {"layers_per_block": 10**6, "block_out_channels": [10**9] * 4, "cross_attention_dim": 10**9}


@pytest.mark.parametrize("entry", sorted(HUGE))
def test_enormous_sizes_are_refused_before_anything_is_made(folder: Path, entry: str) -> None:
    edit(folder / "unet/config.json", **{entry: HUGE[entry]})
    with pytest.raises(CheckpointError, match="config"):
        load_module("unet", opened(folder).submodels["unet"].load)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(entry=st.sampled_from(["dtype", "shape", "data_offsets"]), value=JSON, name=st.text(max_size=40))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_header_is_read_or_refused(tmp_path: Path, entry: str, value: Any, name: str) -> None:
    header = {name: {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]} | {entry: value}}
    text = json.dumps(header).encode()
    path = tmp_path / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    assert name == "__metadata__" or entries[name].end - entries[name].begin == 4


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_entry_of_a_config_is_taken_or_refused(folder: Path, data: st.DataObject) -> None:
    component = data.draw(st.sampled_from(["unet", "vae", "text_encoder", "scheduler"]))
    file = folder / component / ("scheduler_config.json" if component == "scheduler" else "config.json")
    before = file.read_text()
    config = json.loads(before)
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(JSON)
    file.write_text(json.dumps(config))
    try:
        checkpoint = opened(folder)
        if component == "unet":
            load_module("unet", checkpoint.submodels["unet"].load)
    except CheckpointError as error:
        assert len(str(error)) < 4000
    finally:
        file.write_text(before)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_no_link_out_of_the_checkpoint_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer/special_tokens_map.json").unlink(missing_ok=True)
    (folder / "tokenizer/special_tokens_map.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="special_tokens_map.json: a link to a file outside the checkpoint"):
        opened(folder)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots" / ("c" * 40)
    blob = tmp_path / "models--a--b/blobs/1234"
    snapshot.parent.mkdir(parents=True)
    blob.parent.mkdir()
    shutil.move(folder, snapshot)
    shutil.move(snapshot / "tokenizer/tokenizer_config.json", blob)
    (snapshot / "tokenizer/tokenizer_config.json").symlink_to(blob)
    assert "tokenizer/tokenizer_config.json" in opened(snapshot).provenance["files"]


def test_what_no_tokenizer_has_is_left_alone(folder: Path) -> None:
    expected = opened(folder).provenance
    (folder / "tokenizer/passwd").write_text("root")
    assert opened(folder).provenance == expected


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "scheduler/scheduler_config.json"])
def test_what_lies_beside_the_weights_is_of_its_kinds_size(folder: Path, name: str) -> None:
    """The libraries that read it would read it whole."""
    os.truncate(folder / name, 1 << 40)
    place = folder / name.partition("/")[0]
    companion = FAMILIES[DEFAULT].companions[place.name]
    with pytest.raises(CheckpointError, match=rf"{name}: larger than 16 MB"):
        load_companion(companion, place, str(place))


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**9}),
        ("scheduler/scheduler_config.json", {"beta_end": "x"}),
        ("scheduler/scheduler_config.json", {"_class_name": ["x"]}),
        ("scheduler/scheduler_config.json", {"trained_betas": [0.5] * 200_000}),
        ("tokenizer/tokenizer_config.json", {"added_tokens_decoder": "x"}),
        ("tokenizer/tokenizer_config.json", {"model_max_length": "x"}),
        ("feature_extractor/preprocessor_config.json", {"size": {"shortest_edge": 10**9}}),
        ("feature_extractor/preprocessor_config.json", {"image_mean": [None]}),
    ],
)
def test_what_lies_beside_the_weights_has_entries_of_its_kind(folder: Path, file: str, entries: dict[str, Any]) -> None:
    """Known before anything is built: without a verification nothing would load it before it is drawn with."""
    edit(folder / file, **entries)
    with pytest.raises(CheckpointError, match=f"{file}: its {next(iter(entries))} is .*: (input|list) should"):
        opened(folder)
    place = folder / file.partition("/")[0]
    with pytest.raises(CheckpointError, match=f"cannot be loaded: its {next(iter(entries))} is"):
        load_companion(FAMILIES[DEFAULT].companions[place.name], place, str(place))
