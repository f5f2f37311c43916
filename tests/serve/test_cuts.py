"""Graphs that are taken apart once, also when several threads want them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from until import PATIENCE

from sdflow.errors import PassError
from sdflow.runtime.denoiser.moving import Moving
from sdflow.serve.engine.cuts import Cuts

MOVING = Moving("sample", "timestep")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "one", [value], [result])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


class Splits:
    """In the place of `split`: says when one began for a size, and holds some up."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, graph: Any, sizes: Mapping[str, int], *, moving: Moving, guidance: bool) -> Any:
        self.begun.append(sizes["batch"])
        if sizes["batch"] == 8:
            self.began.set()
            assert self.go_on.wait(PATIENCE)
        if sizes["batch"] == 3:
            raise PassError("a batch of 3")
        return graph, sizes["batch"]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Splits]:
    made = Splits()
    monkeypatch.setattr("sdflow.serve.engine.cuts.split", made)
    yield made
    made.go_on.set()


def test_who_wants_other_parts_does_not_wait(model: Path, splits: Splits) -> None:
    cuts = Cuts()
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(cuts.of, model, {"batch": 8}, moving=MOVING, guidance=True) for _ in range(2)]
        assert splits.began.wait(PATIENCE)
        assert cuts.of(model, {"batch": 2}, moving=MOVING, guidance=True)[1] == 2
        assert not any(each.done() for each in slow)
        splits.go_on.set()
        assert [each.result(PATIENCE)[1] for each in slow] == [8, 8]
    assert sorted(splits.begun) == [2, 8]


def test_what_failed_is_tried_again(model: Path, splits: Splits) -> None:
    cuts = Cuts()
    for _ in range(2):
        with pytest.raises(PassError, match="a batch of 3"):
            cuts.of(model, {"batch": 3}, moving=MOVING, guidance=True)
    assert splits.begun == [3, 3]
