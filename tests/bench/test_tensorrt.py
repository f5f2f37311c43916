"""Engines of TensorRT's own: its package is not here, so a stand-in of the same interface records what it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sdflow.bench.engines import ENGINES, missing
from sdflow.bench.tensorrt import EngineBound, engine_of, structure_digest
from sdflow.errors import VerificationError
from sdflow.runtime.sessions.engine_cache import FOLDER_VARIABLE, Profile
from sdflow.runtime.sessions.place import Place

SHAPES = {"x": (2, 16)}
PROFILE = Profile.of(SHAPES)


class Stand:
    """`tensorrt` as far as it is used. calls: in order. refused: the parser takes no graph; lacking: weights that are missing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refused, self.lacking = False, []  # type: bool, list[str]
        self.BuilderFlag = SimpleNamespace(REFIT="refit", STRIP_PLAN="strip")
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")

    def __getattr__(self, name: str) -> Any:
        return lambda *given: Called(self, name)

    def nptype(self, dtype: Any) -> Any:
        return np.float32


class Logger:
    ERROR = 2

    def __init__(self, level: int) -> None: ...


class Called:
    """An object of the stand-in: every method is noted, and gives an object, or what is known here."""

    def __init__(self, stand: Stand, kind: str) -> None:
        self._stand, self._kind = stand, kind
        self.num_errors, self.num_io_tensors = int(stand.refused), 2

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self._stand.calls.append((name, *given))
            known = {
                "parse_from_file": not self._stand.refused,
                "refit_from_file": True,
                "refit_cuda_engine": not self._stand.lacking,
                "get_missing_weights": self._stand.lacking,
                "build_serialized_network": b"an engine",
                "serialize": b"timings",
                "desc": "no such operator",
                "execute_async_v3": True,
                "get_tensor_shape": (2, 16),
            }
            if name == "get_tensor_name":
                return ("x", "y")[given[0]]
            if name == "get_tensor_mode":
                return "in" if given[0] == "x" else "out"
            return known.get(name, Called(self._stand, name))

        return call


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    made = Stand()
    made.Logger = Logger
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "engines"))
    return made


def model(folder: Path, weight: float, scale: float = 2.0) -> Path:
    values = [
        numpy_helper.from_array(np.full((16,), weight, np.float32), "w"),
        numpy_helper.from_array(np.array(scale, np.float32), "s"),
    ]
    nodes = [helper.make_node("Mul", ["x", "w"], ["z"]), helper.make_node("Mul", ["z", "s"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16]) for name in "xy")
    folder.mkdir()
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], values)), folder / "model.onnx")
    return folder / "model.onnx"


def test_an_engine_is_built_once_and_takes_the_weights_of_each(stand: Stand, tmp_path: Path) -> None:
    first, second = model(tmp_path / "a", 1.0), model(tmp_path / "b", 5.0)
    assert structure_digest(first) == structure_digest(second)
    engine_of(first, PROFILE)
    names = [call[0] for call in stand.calls]
    assert ("set_flag", "refit") in stand.calls and ("set_flag", "strip") in stand.calls
    assert ("set_shape", "x", (2, 16), (2, 16), (2, 16)) in stand.calls
    assert ("create_timing_cache", b"") in stand.calls
    assert names.index("parse_from_file") < names.index("build_serialized_network") < names.index("refit_from_file")
    stand.calls.clear()
    engine_of(second, PROFILE)
    assert [call[0] for call in stand.calls] == ["deserialize_cuda_engine", "refit_from_file", "refit_cuda_engine"]
    assert stand.calls[0][1] == b"an engine" and stand.calls[1][1] == str(second)


def test_other_structure_and_other_shapes_are_built_with_the_timings_there(stand: Stand, tmp_path: Path) -> None:
    engine_of(model(tmp_path / "a", 1.0), PROFILE)
    for path, profile in (
        (model(tmp_path / "b", 1.0, scale=3.0), PROFILE),
        (tmp_path / "a/model.onnx", Profile.of({"x": (4, 16)})),
    ):
        stand.calls.clear()
        engine_of(path, profile)
        assert ("create_timing_cache", b"timings") in stand.calls
        assert "build_serialized_network" in [call[0] for call in stand.calls]


def test_what_the_parser_and_the_weights_lack_is_told(stand: Stand, tmp_path: Path) -> None:
    path = model(tmp_path / "a", 1.0)
    stand.refused = True
    with pytest.raises(VerificationError, match="parser does not take this graph"):
        engine_of(path, PROFILE)
    stand.refused, stand.lacking = False, ["w"]
    with pytest.raises(VerificationError, match="do not go into the engine; missing: w"):
        engine_of(path, PROFILE)


def test_tensors_are_named_to_the_engine_before_it_runs(stand: Stand) -> None:
    bound = EngineBound(Called(stand, "engine"), Place("cpu"), SHAPES)
    assert bound.inputs["x"].shape == bound.outputs["y"].shape == torch.Size((2, 16))
    assert ("set_input_shape", "x", (2, 16)) in stand.calls
    for name, tensor in {**bound.inputs, **bound.outputs}.items():
        assert ("set_tensor_address", name, tensor.data_ptr()) in stand.calls
    assert bound.run() is bound.outputs
    assert stand.calls[-1] == ("execute_async_v3", 0)
    with pytest.raises(VerificationError, match="takes x, not other"):
        EngineBound(Called(stand, "engine"), Place("cpu"), {"other": (1,)})


def test_bench_says_what_is_missing() -> None:
    assert missing(ENGINES["tensorrt"], "cpu") == "needs tensorrt and a CUDA device"
