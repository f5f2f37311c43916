"""Small files that ask for endless time or memory: each is refused in words, before it gets them."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from sdflow.disk.input_file import parse_json, read_json
from sdflow.errors import CheckpointError, PassError, VerificationError
from sdflow.onnx_model import reading
from sdflow.onnx_model.files import decode_errors
from sdflow.onnx_model.reading import load_graph
from sdflow.passes.outcome import require_model
from sdflow.runtime.sessions.session import create_session, read_graph
from sdflow.sources.load import load_pickle
from sdflow.sources.safetensors_file import read_header
from sdflow.targets import TARGETS
from sdflow.verify.artifact.graph import read_graph as verified_graph

pytestmark = pytest.mark.timeout(300)


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
    with pytest.raises(CheckpointError, match="endlessly nested objects"):
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
    with pytest.raises(CheckpointError, match="weight is .200000, 200000., but holds only 4 bytes"):
        load_pickle(tmp_path / "model.ckpt", "meta")


def test_a_header_that_would_take_gigabytes_is_not_read(tmp_path: Path) -> None:
    text = b'{"a":[' + b"[]," * 6_000_000 + b"[]]}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="a header of 17 MB; at most 16 MB are supported"):
        read_header(tmp_path / "model.safetensors")


def test_a_header_of_more_tensors_than_any_model_has_is_not_looked_at(tmp_path: Path) -> None:
    """Their names would be compared with those of every model for minutes."""
    text = json.dumps({f"{index}.lora_up.weight": {} for index in range(50_001)}).encode()
    (tmp_path / "lora.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="50,001 tensors; at most 50,000 are supported"):
        read_header(tmp_path / "lora.safetensors")


def test_a_header_is_utf8_as_the_format_says(tmp_path: Path) -> None:
    text = "{}".encode("utf-16")
    (tmp_path / "lora.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_header(tmp_path / "lora.safetensors")


def test_json_that_would_take_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[" + b"1," * 9_000_000 + b"1]")
    with pytest.raises(OSError, match="larger than 16 MB"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("level", ["[", '{"a":'])
def test_json_is_nested_as_deeply_as_anyone_needs(level: str) -> None:
    """Python 3.12 reads 5,000 levels: what walks through them would be out of them."""
    end = {"[": "]"}.get(level, "}")
    assert parse_json(level * 90 + "1" + end * 90)
    for deep in (150, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(level * deep + "1" + end * deep)


def small_messages(field: int, count: int) -> bytes:
    """The bytes of an ONNX model whose graph has so many empty entries of this field."""
    graph = bytes([field << 3 | 2, 0]) * count
    length, begin = len(graph), b"\x08\x08\x3a"
    while length > 127:
        begin += bytes([length & 127 | 128])
        length >>= 7
    return begin + bytes([length]) + graph


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """As many entries as a graph may have here: to count a million takes a second."""
    monkeypatch.setattr(reading, "MOST_ENTRIES", 5000)
    return 5000


@pytest.mark.parametrize("field", [1, 5, 13])
def test_a_graph_of_nothing_but_empty_entries_is_not_built(tmp_path: Path, field: int, few: int) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(small_messages(field, few + 10))
    for read in (read_graph, verified_graph, lambda model: create_session(model, TARGETS["cpu"])):
        with pytest.raises(VerificationError, match=r"model.onnx: a graph of more than 5,000 entries"):
            read(path)
    with pytest.raises(PassError, match="mine.py: wrote a graph of more than"):
        require_model(tmp_path, "mine.py")
    path.write_bytes(small_messages(field, few - 2))
    assert len(path.read_bytes()) > 2 * few - 20
    assert load_graph(path).graph.ByteSize() == 2 * (few - 2)


def test_a_graph_of_many_packed_numbers_is_not_built(tmp_path: Path, few: int) -> None:
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    tensor = model.graph.initializer.add(data_type=onnx.TensorProto.INT64, dims=[17 * few])
    tensor.int64_data.extend([0] * (17 * few))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(VerificationError, match="entries"):
        load_graph(tmp_path / "model.onnx")


@pytest.mark.usefixtures("few")
def test_a_large_graph_is_read_as_before(tmp_path: Path) -> None:
    """Its weights are in it, and an unknown field of another format's."""
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(1 << 20, dtype=np.float32), "w"))
    model.graph.initializer.add(data_type=1, dims=[2], float_data=[1.0, 2.0])
    content = model.SerializeToString() + b"\xfd\x7f" + b"abcd" + b"\xf9\x7f" + b"12345678"
    (tmp_path / "model.onnx").write_bytes(content)
    assert load_graph(tmp_path / "model.onnx").graph == model.graph
    for end in (len(content) // 2, len(content) - 3):  # cut off
        (tmp_path / "model.onnx").write_bytes(content[:end])
        with pytest.raises(decode_errors()):
            load_graph(tmp_path / "model.onnx")


@pytest.mark.skipif(os.name == "nt", reason="there are none")
def test_a_pipe_in_place_of_a_graph_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    for read in (read_graph, verified_graph, lambda model: create_session(model, TARGETS["cpu"])):
        with pytest.raises(VerificationError, match="a pipe, a socket or a device"):
            read(tmp_path / "model.onnx")
