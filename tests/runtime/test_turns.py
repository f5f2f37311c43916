"""Where weights that could take turns are streamed, and what is said where they cannot be."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import pytest
from beside_diffusers import put_together
from converted import Converted

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import SlowerWarning, TargetUnavailableError, UsageError
from sdflow.runtime.drawing import turns
from sdflow.runtime.drawing.turns import moving_weights
from sdflow.runtime.files.folder import folder_configs, folder_family
from sdflow.runtime.sessions import streamed_weights
from sdflow.runtime.sessions.residency import Residency, reserved
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.stream_plan import StreamBuffers, buffer_size, stream_plan
from sdflow.runtime.sessions.streamed_weights import StreamedWeights
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.targets import TARGETS

LEAST, SEGMENT = 1 << 10, 1 << 15
SHARE = 0.4
"""Of the denoiser's weights that can stay."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, converted: Converted) -> Path:
    checkpoint = open_checkpoint("synthetic:flux2-tiny", digests=PlainDigests(), download=False)
    return put_together(checkpoint, converted, tmp_path_factory.mktemp("turns") / "flux2-tiny")


@pytest.mark.parametrize("lacking", ["nothing", "compiler", "host memory", "fixed weights"])
def test_what_can_take_turns_is_streamed_only_where_nothing_is_lacking(
    folder: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, configs = folder_family(folder), folder_configs(folder)
    name = family.denoiser
    size = (folder / name / WEIGHTS_FILE).stat().st_size
    kept = reserved(turns._denoiser_bytes(folder, family, configs))
    buffers = buffer_size(read_graph(folder / name / MODEL_FILE), least=LEAST, segment=SEGMENT)
    room = kept + int(SHARE * size) + 2 * buffers

    def no_library(device: int) -> Path:
        raise TargetUnavailableError("there is no C compiler")

    monkeypatch.setattr(turns, "stream_plan", partial(stream_plan, least=LEAST))
    monkeypatch.setattr(turns, "buffer_size", partial(buffer_size, least=LEAST, segment=SEGMENT))
    monkeypatch.setattr(turns, "residency", lambda device, limit: Residency(lambda: room, lambda: None))
    if lacking == "compiler":
        monkeypatch.setattr(turns, "operator_library", no_library)
    if lacking == "host memory":
        monkeypatch.setattr(turns, "available_bytes", lambda device: 1000)

    def moves(changing: bool) -> turns.Moves | None:
        return moving_weights(folder, [name], TARGETS["cuda"], "fit", None, other_weights=room, changing=changing)

    if lacking == "fixed weights":  # LoRAs are to change them
        found = moves(changing=True)
        assert found is not None and not found.streams
        return
    said = {
        "nothing": "streams .* because cuda has only .* available",
        "compiler": "take turns with others instead of being streamed.*there is no C compiler",
        "host memory": "take turns with others instead of being streamed.*too much of this computer",
    }
    with pytest.warns(SlowerWarning, match=said[lacking]) as told:
        found = moves(changing=False)
    assert found is not None and len(told) == 1 and ([*found.streams] == [name]) == (lacking == "nothing")


def test_what_fits_neither_by_itself_nor_streamed_is_refused_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(device: int) -> Path:
        raise TargetUnavailableError("there is no C compiler")

    name = folder_family(folder).denoiser
    monkeypatch.setattr(turns, "residency", lambda device, limit: Residency(lambda: 1000, lambda: None))
    monkeypatch.setattr(turns, "operator_library", no_library)
    with pytest.raises(UsageError, match="cuda has only .* available.*cannot be streamed: there is no C compiler"):
        moving_weights(folder, [name], TARGETS["cuda"], "fit", None)


def test_memory_that_cannot_be_locked_is_copied_from_without_a_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = folder_family(folder).denoiser
    graph = read_graph(folder / name / MODEL_FILE)
    buffers = StreamBuffers(buffer_size(graph, least=LEAST, segment=SEGMENT))
    plan = stream_plan(graph, (folder / name / WEIGHTS_FILE).stat().st_size, buffers, least=LEAST)
    assert plan is not None
    pair = plan.buffers.on("cpu")
    monkeypatch.setattr(plan.buffers, "on", lambda device: tuple(each.to("meta") for each in pair))
    monkeypatch.setattr(streamed_weights, "page_locked", lambda size: None)
    with pytest.warns(SlowerWarning, match="memory that the driver could not lock"):
        weights = StreamedWeights(folder / name, plan, "cuda")
    assert not weights.captures and len(weights._at) == len(plan.streamed)
    (location, offset, length), at = next(iter(weights._at.items()))
    assert ctypes.string_at(at, length) == (folder / name / location).read_bytes()[offset : offset + length]
