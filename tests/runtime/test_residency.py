"""Weights take turns on a device: those in use are there, and those that were not used for the longest time leave first."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.errors import UsageError
from sdflow.runtime import vae
from sdflow.runtime.bands.memory import band_bytes, stored_bytes
from sdflow.runtime.draw_request import PARAMETERS
from sdflow.runtime.drawing.turns import moving_weights
from sdflow.runtime.files.folder import folder_family, submodel_config
from sdflow.runtime.sessions.residency import HEADROOM, Residency
from sdflow.targets import TARGETS

MB = 1 << 20


class Device:
    """A memory of fixed size, of which maps of this process take their parts."""

    def __init__(self, size: int) -> None:
        self.size, self.maps = size, dict[int, mmap.mmap]()

    def free(self) -> int:
        return self.size - sum(map(len, self.maps.values()))


class Weights:
    """A map that comes and goes, filled with a byte of its own."""

    def __init__(self, device: Device, number: int, size: int) -> None:
        self.device, self.number, self.size = device, number, size

    @property
    def present(self) -> bool:
        return self.number in self.device.maps

    @property
    def missing(self) -> int:
        return 0 if self.present else self.size

    def bring(self) -> None:
        assert self.device.free() >= self.size, "more than the device has"
        self.device.maps[self.number] = mmap.mmap(-1, self.size)
        self.device.maps[self.number][:1] = bytes([self.number])

    def remove(self, wanted: int) -> None:
        self.device.maps.pop(self.number).close()


class Pieces:
    """Maps that come and go one by one, each filled with a byte of its own."""

    def __init__(self, device: Device, count: int, size: int) -> None:
        self.device, self.count, self.piece, self.size = device, count, size, count * size
        self.brought = 0

    @property
    def missing(self) -> int:
        return self.piece * sum(number not in self.device.maps for number in range(self.count))

    def bring(self) -> None:
        for number in range(self.count):
            if number not in self.device.maps:
                assert self.device.free() >= self.piece, "more than the device has"
                self.device.maps[number] = mmap.mmap(-1, self.piece)
                self.device.maps[number][:1] = bytes([number % 256])
                self.brought += 1

    def remove(self, wanted: int) -> None:
        for number in reversed(range(self.count)):
            if wanted > 0 and number in self.device.maps:
                self.device.maps.pop(number).close()
                wanted -= self.piece


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    uses=st.lists(st.integers(0, 4), max_size=30),
    room=st.integers(40, 120),
)
def test_what_is_used_is_there_and_the_longest_unused_leaves_first(
    sizes: list[int], uses: list[int], room: int
) -> None:
    device = Device(HEADROOM + room * MB)
    places = Residency(device.free, lambda: None)
    weights = [Weights(device, number, size * MB) for number, size in enumerate(sizes)]
    expected: OrderedDict[int, None] = OrderedDict()
    for use in uses:
        number = use % len(weights)
        if number not in expected:
            while expected and sum(sizes[each] for each in expected) + sizes[number] > room:
                expected.popitem(last=False)
        expected[number] = None
        expected.move_to_end(number)
        with places.using(weights[number]):
            assert device.maps[number][0] == number
        assert {*device.maps} == {*expected}
    for each in [*device.maps]:
        weights[each].remove(0)


def test_a_limit_counts_from_what_was_free_at_first() -> None:
    device = Device(10 * HEADROOM)
    device.maps[99] = mmap.mmap(-1, HEADROOM)  # somebody else's
    places = Residency(device.free, lambda: None, limit=4 * HEADROOM)
    assert places.room() == 4 * HEADROOM
    first, second = Weights(device, 1, 2 * HEADROOM), Weights(device, 2, 2 * HEADROOM)
    with places.using(first):
        assert places.room() == 2 * HEADROOM
    with places.using(second):
        assert not first.present
    device.maps.clear()


def test_a_limit_counts_what_this_process_uses_since_then() -> None:
    """Without CUDA's context, as `sdflow plan` says, and without other processes."""
    device, context = Device(10 * HEADROOM), HEADROOM // 2
    device.maps[99] = mmap.mmap(-1, HEADROOM)  # somebody else's
    own = Weights(device, 1, 2 * HEADROOM)
    places = Residency(
        device.free, lambda: None, limit=4 * HEADROOM, used=lambda: context + (own.size if own.present else 0)
    )
    assert places.room() == 4 * HEADROOM
    device.maps[98] = mmap.mmap(-1, HEADROOM)
    with places.using(own):
        assert places.room() == 2 * HEADROOM
    device.maps.clear()


def test_nobody_waits_for_work_unless_something_leaves() -> None:
    device, waited = Device(HEADROOM + 30 * MB), list[bool]()
    places = Residency(device.free, lambda: waited.append(True))
    first, second = Weights(device, 1, 20 * MB), Weights(device, 2, 20 * MB)
    for each, waits in ((first, 0), (first, 0), (second, 1), (second, 1), (first, 2)):
        with places.using(each):
            assert len(waited) == waits
    device.maps.clear()


def test_weights_leave_only_as_far_as_their_room_is_needed() -> None:
    device = Device(HEADROOM + 50 * MB)
    places = Residency(device.free, lambda: None)
    large, small = Pieces(device, 4, 10 * MB), Weights(device, 9, 20 * MB)
    with places.using(large):
        assert (large.brought, places.reachable()) == (4, device.size)
    with places.using(small):
        assert large.missing == 10 * MB
    with places.using(large):
        assert (large.missing, large.brought, small.present) == (0, 5, False)
        assert [device.maps[number][0] for number in range(4)] == [0, 1, 2, 3]
    places.make_room(HEADROOM + 31 * MB)
    assert large.missing == 30 * MB
    places.make_room(device.size)
    assert not device.maps
    with places.using(large):
        assert large.brought == 9
    device.maps.clear()


def test_a_decoder_evicts_what_it_needs_and_works_in_bands_only_if_all_would_not_suffice(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = submodel_config(tiny_pipeline, "vae_decoder")
    part = folder_family(tiny_pipeline).part("vae_decoder").of(config)
    monkeypatch.setattr(vae, "ALWAYS_THERE", 0)

    def tiled(room: int, tiles: bool | None = None) -> tuple[vae.Tiling | None, int]:
        """The bands for a large image, and how much then leaves; of `room` bytes, all but 5 MB are in use."""
        device = Device(HEADROOM + 5 * MB)
        places, weights = Residency(device.free, lambda: None), Pieces(device, (room - 5 * MB) // MB, MB)
        device.size += weights.size
        with places.using(weights):
            assert device.free() == HEADROOM + 5 * MB
        half: Any = SimpleNamespace(
            part=part, config=config, place=SimpleNamespace(device="cuda"), residency=places, reached=0,
            static_shapes=False, profiles=False, path=Path("model.onnx"), blends=False, banded=None,
        )  # fmt: skip
        found = vae.tiling(half, 128, 128, 8, tiles), weights.missing
        device.maps.clear()
        return found

    half: Any = SimpleNamespace(part=part, config=config, place=SimpleNamespace(device="cuda"))
    whole = int(vae._wanted(half, 128, 128) / vae.SHARE)
    found, left = tiled(whole + 40 * MB)
    assert found is None and whole - 5 * MB <= left <= whole - 3 * MB
    assert tiled(whole + 40 * MB, tiles=False) == (None, left), "who says it gets it whole, and the room for it"
    for room, tiles in ((whole - HEADROOM - 20 * MB, None), (whole + 40 * MB, True)):
        found, left = tiled(room, tiles)
        assert found is not None and found.storage in ("cpu", "cuda")
        stored = stored_bytes(config, 1024, 1024) if found.storage == "cuda" else 0
        needed = int((stored + band_bytes(part.model, config, (128, 128), found.pixels // 8, 8)) / vae.SHARE)
        assert max(0, needed - 5 * MB) <= left <= max(0, needed - 3 * MB)


def test_room_is_made_for_what_work_allocates_even_if_its_weights_are_there() -> None:
    device = Device(HEADROOM + 40 * MB)
    places = Residency(device.free, lambda: None)
    first, second = Weights(device, 1, 20 * MB), Weights(device, 2, 10 * MB)
    for each in (first, second):
        with places.using(each):
            pass
    with places.using(first, 10 * MB):
        assert second.present
    with places.using(first, 15 * MB):
        assert first.present and not second.present
    with places.using(second, 25 * MB):
        assert not first.present
    device.maps.clear()


def test_weights_that_stay_are_not_moved_by_later_uses() -> None:
    device = Device(HEADROOM + 30 * MB)
    places = Residency(device.free, lambda: None)
    first, second = Weights(device, 1, 10 * MB), Weights(device, 2, 20 * MB)
    places.stay(first)
    for each in (first, second, first):
        with places.using(each):
            pass
    places.make_room(device.size)
    assert first.present and not second.present
    device.maps.clear()


def test_what_cannot_be_read_does_not_count_as_present() -> None:
    class Unreadable(Weights):
        def bring(self) -> None:
            raise OSError("it is gone")

    device = Device(HEADROOM + 30 * MB)
    places = Residency(device.free, lambda: None)
    gone = Unreadable(device, 1, MB)
    for _ in range(2):
        with pytest.raises(OSError, match="it is gone"), places.using(gone):
            pass
    assert not gone.present


def test_weights_in_use_stay_while_another_thread_needs_their_room() -> None:
    device = Device(HEADROOM + 30 * MB)
    places = Residency(device.free, lambda: None)
    first, second = Weights(device, 1, 20 * MB), Weights(device, 2, 20 * MB)

    def other() -> None:
        with places.using(second):
            pass

    with places.using(first):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert first.present and thread.is_alive()
    thread.join(10)
    assert second.present and not first.present
    device.maps.clear()


def test_a_limit_is_read_as_a_size() -> None:
    read = PARAMETERS["device_memory"].read
    assert read is not None and read("12GB") == 12 * 10**9
    with pytest.raises(UsageError, match="--device-memory: 'ten' is not a size"):
        read("ten")


def test_on_the_cpu_nothing_moves(tiny_pipeline: Path) -> None:
    assert moving_weights(tiny_pipeline, ["unet"], TARGETS["cpu"], "fit", 1) is None


@pytest.mark.gpu
def test_memory_leaves_a_device_and_its_values_come_back_to_their_address() -> None:
    import torch

    from sdflow.runtime.sessions.moving_memory import MovingMemory

    values = torch.randint(0, 256, (300 * MB + 5,), dtype=torch.uint8)
    read = list[bool]()

    def fill(memory: torch.Tensor, begin: int) -> None:
        read.append(True)
        memory.copy_(values)

    moving = MovingMemory(values.numel(), "cuda", fill)
    moving.bring()
    address = moving.bytes().data_ptr()
    free = torch.cuda.mem_get_info()[0]
    for wanted in (moving.size, 20 * MB, moving.size):
        torch.cuda.synchronize()
        moving.remove(wanted)
        assert torch.cuda.mem_get_info()[0] - free >= wanted and moving.missing >= wanted
        moving.bring()
        assert moving.bytes().data_ptr() == address and torch.equal(moving.bytes().cpu(), values)
    assert len(read) == 1, "it waited in the host's memory"


@pytest.mark.gpu
def test_weights_that_are_more_than_the_device_are_refused(tiny_pipeline: Path) -> None:
    unet = (tiny_pipeline / "unet/model.onnx.data").stat().st_size
    with pytest.raises(UsageError, match=r"its unet has .* of weights.*\n  Quantize it"):
        moving_weights(tiny_pipeline, ["unet"], TARGETS["cuda"], "fit", unet // 2)
