"""The data file is written in order, in one pass, and its digests are those of what is on the disk."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from sdflow.weights import stream
from sdflow.weights.stream import Digests, Piece, write_pieces


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", 1000)
    monkeypatch.setattr(stream, "AHEAD", 5000)
    monkeypatch.setattr(stream, "FLUSHED", 3000)


def sums(content: bytes) -> str:
    """As `PageSums` says it computes them, in Python's numbers."""
    padded = content.ljust(-(-len(content) // 4096) * 4096, b"\0")
    pages = [padded[begin : begin + 4096] for begin in range(0, len(padded), 4096)]
    totals = [sum(struct.unpack("<512Q", page)) % 2**64 for page in pages]
    return sha256(struct.pack(f"<{len(totals)}Q", *totals) + str(len(content)).encode())


@pytest.mark.parametrize("of_base", ["digest", "sums", None])
def test_computed_and_copied_pieces_come_in_order_whichever_is_ready_first(
    tmp_path: Path, of_base: Literal["digest", "sums"] | None
) -> None:
    base = os.urandom(50_000)
    (tmp_path / "base").write_bytes(base)
    expected, pieces, position = b"", [], 0
    for index, length in enumerate((1, 2500, 700, 16_000, 2, 20_000, 10_797)):
        if index % 2:
            pieces.append(Piece(length, None))
            expected += base[position : position + length]
        else:
            values = np.full(length, index, np.uint8)
            pieces.append(
                Piece(length, lambda memory, values=values, index=index: time.sleep((7 - index) / 100) or values)
            )
            expected += values.tobytes()
        position += length
    assert position == len(base)
    seen: list[tuple[int, int]] = []
    digests = write_pieces(
        tmp_path / "out", pieces, tmp_path / "base", of_base=of_base, progress=lambda *at: seen.append(at)
    )
    assert (tmp_path / "out").read_bytes() == expected
    assert digests == Digests(
        sha256(expected),
        sums(expected),
        sha256(base) if of_base == "digest" else None,
        sums(base) if of_base else None,
    )
    assert seen == sorted(seen)
    assert seen[-1] == (50_000, 50_000)


def test_a_piece_that_cannot_be_computed_ends_it(tmp_path: Path) -> None:
    def fail(memory: Any) -> bytes:
        raise ValueError("no such weight")

    pieces = [Piece(4000, lambda memory: bytes(4000)), Piece(1, fail), *[Piece(4000, lambda memory: bytes(4000))] * 50]
    with pytest.raises(ValueError, match="no such weight"):
        write_pieces(tmp_path / "out", pieces, None, of_base=None, progress=lambda done, total: None)


def test_memory_is_used_again_once_it_was_written_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "REUSED", 1000)
    monkeypatch.setattr(stream, "AHEAD", 20_000)
    lengths = [(1500, 2400, 900, 1600, 6000)[index % 5] for index in range(200)]
    held: list[Any] = []

    def compute(memory: Any, index: int) -> Any:
        held.append(memory)  # keeps what is given up from being allocated again
        memory.fill(index % 251)
        return memory

    pieces = [Piece(length, partial(compute, index=index)) for index, length in enumerate(lengths)]
    digests = write_pieces(tmp_path / "out", pieces, None, of_base=None, progress=lambda done, total: None)
    expected = b"".join(bytes([index % 251]) * length for index, length in enumerate(lengths))
    assert (tmp_path / "out").read_bytes() == expected
    assert (digests.written, digests.sums) == (sha256(expected), sums(expected))
    large = [each for each in held if len(each) >= 1000]
    assert len({each.ctypes.data for each in large}) < len(large) / 2
