"""Small files that ask for endless time or memory: each is refused in words, before it gets them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest
import torch

from sdflow.errors import CheckpointError
from sdflow.input_file import read_json
from sdflow.sources.load import load_pickle
from sdflow.sources.safetensors_file import read_header

pytestmark = pytest.mark.timeout(60)


def archived(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


def doubled(times: int) -> bytes:
    """A map with a tuple of twice the same for its key, so many deep; it takes some bytes for each."""
    inner = b"}X\x01\x00\x00\x00vX\x01\x00\x00\x00aq\x00s"
    for place in range(times):
        inner += b"X\x02\x00\x00\x00v" + bytes([65 + place]) + b"h" + bytes([place]) + b"h" + bytes([place])
        inner += b"\x86q" + bytes([place + 1]) + b"s"
    return b"\x80\x02" + inner + b"h" + bytes([times]) + b"K\x01s."


def test_a_key_that_unfolds_without_an_end_is_never_hashed(tmp_path: Path) -> None:
    path = archived(tmp_path / "model.ckpt", doubled(60))
    assert path.stat().st_size < 2000
    with pytest.raises(CheckpointError, match="objects within objects without an end"):
        load_pickle(path, "meta")


def test_a_pickle_of_millions_of_objects_is_not_read(tmp_path: Path) -> None:
    path = archived(tmp_path / "model.ckpt", b"\x80\x02](" + b"K\x01" * 700_000 + b"e.")
    with pytest.raises(CheckpointError, match="too many objects"):
        load_pickle(path, "meta")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_writes_is_read_as_before(tmp_path: Path, zipped: bool) -> None:
    shared = torch.randn(4, 3)
    written = {"one": shared, "two": shared.T, "whole": torch.ones(3, dtype=torch.int64)}
    torch.save({"state_dict": written}, tmp_path / "model.ckpt", _use_new_zipfile_serialization=zipped)
    found = load_pickle(tmp_path / "model.ckpt", "cpu")
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], written[name]) for name in written)


def test_a_tensor_has_as_many_bytes_as_its_shape_says(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1).as_strided((200_000, 200_000), (0, 0))}, tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match="weight is .200000, 200000., and holds only 4 bytes"):
        load_pickle(tmp_path / "model.ckpt", "meta")


def test_a_header_that_would_take_gigabytes_is_not_read(tmp_path: Path) -> None:
    text = b'{"a":[' + b"[]," * 6_000_000 + b"[]]}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="a header of 17 MB, where 16 are read at most"):
        read_header(tmp_path / "model.safetensors")


def test_json_that_would_take_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[" + b"1," * 9_000_000 + b"1]")
    with pytest.raises(OSError, match="larger than 16 MB"):
        read_json(tmp_path / "config.json")
