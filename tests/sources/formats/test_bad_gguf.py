"""Damaged and hostile GGUF files: each is refused in words, before it gets time or memory."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from low_bit_files import T, mixed, write_gguf
from original_layout import flux_tensors

from sdflow.errors import CheckpointError
from sdflow.sources.formats import open_weights
from tests.sources.formats.test_gguf import module, opened

F32, F16, Q8_0 = 0, 1, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """As in the file: the innermost axis first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    tensors: list[bytes],
    data: bytes,
    entries: list[bytes] | None = None,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    entries = [] if entries is None else entries
    count, pairs = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, count, pairs) + b"".join(entries) + b"".join(tensors)
    return header.ljust(-(-len(header) // alignment) * alignment, b"\0") + data


TWO = [info("a", (8,), F32, 0), info("b", (4, 2), F32, 32)]
DATA = bytes(64)
BAD: dict[str, tuple[bytes, str]] = {
    "of nothing": (b"", "it is empty"),
    "of another kind": (b"<html>login</html>", "it is a web page"),
    "version 1": (gguf(TWO, DATA, version=1), "version 1; 2 and 3 are supported"),
    "big-endian": (gguf(TWO, DATA, version=3 << 24), "it is big-endian"),
    "truncated": (gguf(TWO, DATA[:-1]), "its tensors end at byte"),
    "truncated header": (gguf(TWO, DATA)[:60], "bytes at byte"),
    "longer": (gguf(TWO, DATA + bytes(1)), "its tensors end at byte"),
    "overlapping": (gguf([TWO[0], info("b", (4, 2), F32, 0)], DATA), "tensor b is at byte"),
    "far away": (gguf([TWO[0], info("b", (4, 2), F32, 2**63)], DATA), "tensor b is at byte"),
    "out of order": (gguf(TWO[::-1], DATA), "tensor b is at byte"),
    "of two names": (gguf([TWO[0], info("a", (8,), F32, 32)], DATA), "two tensors of one name"),
    "absurd sizes": (gguf([info("a", (2**40, 2**20), F32, 0)], DATA), "its tensors end at byte"),
    "a size of 0": (gguf([info("a", (0, 8), F32, 0)], DATA), r"tensor a is \[8, 0\]"),
    "many axes": (gguf([info("a", (1,) * 9, F32, 0)], DATA), "tensor a has 9 axes"),
    "an unknown type": (gguf([info("a", (8,), 99, 0)], DATA), "tensor a is of the unknown type 99"),
    "half a block": (gguf([info("a", (48,), Q8_0, 0)], DATA), "rows of 48 values of a are not whole blocks of Q8_0"),
    "no name": (gguf([info(b"\xff\xfe", (8,), F32, 0)], DATA), "not UTF-8"),
    "a long name": (gguf([text("x" * 2000) + bytes(40)], DATA), "a name of 2000 bytes"),
    "endless tensors": (gguf(TWO, DATA, counts=(2**62, 0)), "tensors and 0 entries of metadata"),
    "endless metadata": (gguf(TWO, DATA, counts=(2, 2**62)), "entries of metadata"),
    "an endless text": (gguf(TWO, DATA, [entry("k", 8, struct.pack("<Q", 2**63))]), "a field of 9223372036854775808 bytes"),
    "an endless list": (gguf(TWO, DATA, [entry("k", 9, struct.pack("<IQ", 4, 2**62))]), "a field of"),
    "endless texts": (gguf(TWO, DATA, [entry("k", 9, struct.pack("<IQ", 8, 2**62))]), "lists of .* texts"),
    "lists of lists": (gguf(TWO, DATA, [entry("k", 9, struct.pack("<IQ", 9, 1))]), "a list of the type 9"),
    "unknown metadata": (gguf(TWO, DATA, [entry("k", 77, b"")]), "metadata of the unknown type 77"),
    "two entries": (gguf(TWO, DATA, [entry("k", 7, b"\1")] * 2), "two entries k"),
    "no alignment": (gguf(TWO, DATA, [entry("general.alignment", 4, bytes(4))]), "an alignment of 0"),
    "an odd alignment": (gguf(TWO, DATA, [entry("general.alignment", 4, struct.pack("<I", 48))]), "an alignment of 48"),
    "another shape": (
        gguf(TWO, DATA, [entry("comfy.gguf.orig_shape.a", 9, struct.pack("<IQ2i", 5, 2, 3, 3))]),
        r"a is \[8\], but its original shape is given as \(3, 3\)",
    ),
    "a part": (gguf(TWO, DATA, [entry("split.count", 2, struct.pack("<H", 3))]), "it is one of 3 parts"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_it_is_refused_in_words(what: str, tmp_path: Path) -> None:
    content, told = BAD[what]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=told) as raised:
        open_weights(tmp_path / "x.gguf")
    assert raised.value.where and raised.value.remedy and len(str(raised.value)) < 600


def test_what_the_cases_change_is_a_file_that_is_read(tmp_path: Path) -> None:
    values = np.arange(16, dtype="<f4")
    alignment = entry("general.alignment", 4, struct.pack("<I", 64))
    for content in (
        gguf(TWO, values.tobytes()),
        gguf(TWO, values.tobytes(), version=2),
        gguf(TWO[:1], values[:8].tobytes() + bytes(32), [alignment], alignment=64),
    ):
        (tmp_path / "x.gguf").write_bytes(content)
        tensors = open_weights(tmp_path / "x.gguf").tensors
        assert np.array_equal(tensors["a"].values(), values[:8])
        assert "b" not in tensors or np.array_equal(tensors["b"].values(), values[8:].reshape(2, 4))


def test_a_scale_that_is_no_number_is_told_when_the_weights_are_read(tmp_path: Path) -> None:
    model = "synthetic:flux1-schnell-tiny"
    path = write_gguf(tmp_path / "x.gguf", flux_tensors(module(opened(model), "transformer")), mixed(T.Q8_0), "flux")
    content = bytearray(path.read_bytes())
    begin = open_weights(path).pieces["double_blocks.0.img_mlp.0.weight"].begin
    content[begin : begin + 2] = np.float16("nan").tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="are NaN or infinite"):
        module(opened(model, components={"transformer": str(path)}), "transformer")


def test_a_file_is_inspected_without_the_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", {"w": torch.zeros(2, 32)}, lambda *_: T.Q8_0, "flux")
    code = """if True:
        import sys
        from pathlib import Path
        from sdflow.inspection import inspect
        (found,) = inspect(Path(sys.argv[1]))
        assert found.details["types"] == "Q8_0 (1)", found
        assert not {"gguf", "torch", "numpy"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.gguf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
