"""Device memory behind fixed addresses, with the driver's calls as the CPU has them: files mapped to reserved addresses."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdflow.machine import cuda_memory
from sdflow.machine.cuda_memory import AddressRange

DRIVER = Path(__file__).parents[1] / "cuda_on_cpu/memory_driver.c"
PIECE = 4 << 20
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the driver is compiled, for Linux"
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", library, DRIVER], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.held_handles.restype, loaded.leave_handles.argtypes = ctypes.c_int64, [ctypes.c_int64]
    monkeypatch.setattr(cuda_memory, "_driver", lambda: loaded)
    monkeypatch.setattr(cuda_memory, "PIECE", PIECE)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return loaded


def memory_of(addresses: AddressRange) -> memoryview:
    """What is mapped."""
    at = int(addresses._address.value)
    return memoryview((ctypes.c_uint8 * addresses.filled).from_address(at)).cast("B")


def filled(addresses: AddressRange) -> None:
    while addresses.filled < addresses.size:
        at = addresses.filled
        size = addresses.fill_piece()
        memory_of(addresses)[at : at + size] = bytes([1 + at // PIECE]) * size


def test_pieces_at_the_end_leave_and_come_back_to_their_addresses(driver: ctypes.CDLL) -> None:
    addresses = AddressRange(3 * PIECE + 5, 0)
    assert (addresses.size, addresses.filled) == (3 * PIECE + (2 << 20), 0), "whole granules"
    filled(addresses)
    assert driver.held_handles() == 4
    before, at = bytes(memory_of(addresses)), addresses._address.value
    for wanted, rest in ((1, 3 * PIECE), (3 << 20, 2 * PIECE), (addresses.size, 0)):
        filled(addresses)
        addresses.empty(wanted)
        assert addresses.filled == rest and driver.held_handles() == rest // PIECE
        assert bytes(memory_of(addresses)) == before[:rest]
    addresses.empty(0)
    filled(addresses)
    assert (bytes(memory_of(addresses)), addresses._address.value) == (before, at)
    addresses.empty()
    assert driver.held_handles() == 0


def test_what_the_device_has_no_memory_for_leaves_nothing_behind(driver: ctypes.CDLL) -> None:
    addresses = AddressRange(3 * PIECE, 0)
    driver.leave_handles(2)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="cuMemCreate"):
        filled(addresses)
    assert addresses.filled == 2 * PIECE and driver.held_handles() == 2
    del addresses
    assert driver.held_handles() == 0
