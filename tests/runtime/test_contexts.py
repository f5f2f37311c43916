"""Models that hold what a provider compiled are kept and loaded. ONNX Runtime is the real one, whose CPU provider compiles
nothing; that NVIDIA's provider compiles every graph of ours is for benchmarks/providers/rtx_without_gpu.py."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.errors import SlowerWarning
from sdflow.runtime.sessions.contexts import CONTEXT, load_with_context
from sdflow.runtime.sessions.engine_cache import MIGRAPHX, TENSORRT, machine_key
from sdflow.targets import TARGETS

HERE = Path(__file__).parent


def save(path: Path, operator: str) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", [x], [y])
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def run(model: Path, engines: Path, ort: Any = onnxruntime) -> list[float]:
    """What the session that came up computes of -1 and 2."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    load = partial(onnxruntime.InferenceSession, sess_options=options)
    session: Any = load_with_context(ort, model, engines, options, load)
    found: list[float] = session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist()
    return found


def test_what_is_kept_is_loaded_in_place_of_the_model(tmp_path: Path) -> None:
    model = save(tmp_path / "model.onnx", "Relu")
    save(tmp_path / "engines" / CONTEXT / "model.onnx", "Abs")
    assert run(model, tmp_path / "engines") == [1.0, 2.0]


def test_where_a_provider_compiles_nothing_the_model_is_loaded_and_that_is_told(tmp_path: Path) -> None:
    model = save(tmp_path / "model.onnx", "Relu")
    (tmp_path / "engines").mkdir()
    with pytest.warns(SlowerWarning, match="compiled at every start"):
        assert run(model, tmp_path / "engines") == [0.0, 2.0]
    assert list((tmp_path / "engines").iterdir()) == [], "nothing half made stays"


def test_what_is_kept_and_cannot_be_loaded_is_removed_and_compiled_again(tmp_path: Path) -> None:
    """As an engine of a GPU that this one is not, or a file that was cut off."""
    model = save(tmp_path / "model.onnx", "Relu")
    kept = tmp_path / "engines" / CONTEXT / "model.onnx"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(model.read_bytes()[:20])
    with pytest.warns(SlowerWarning) as told:
        assert run(model, tmp_path / "engines") == [0.0, 2.0]
    assert "is recompiled" in str(told[0].message)
    assert not kept.parent.exists()


class Compiling:
    """ONNX Runtime with a provider that compiles every model, which none here does: what it compiles is the model itself."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        self.meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def ModelCompiler(self, options: Any, model: str, **_: Any) -> Any:
        def compile_to_file(path: str) -> None:
            shutil.copy(model, path)
            self.meanwhile()

        return SimpleNamespace(compile_to_file=compile_to_file)


def test_a_compiled_model_that_cannot_be_put_in_its_place_is_told(tmp_path: Path) -> None:
    model, engines = save(tmp_path / "model.onnx", "Relu"), tmp_path / "engines"
    engines.mkdir()
    ort = Compiling(lambda: (engines / CONTEXT).write_bytes(b"in the way"))
    with pytest.warns(SlowerWarning, match="compiled at every start") as told:
        assert run(model, engines, ort) == [0.0, 2.0]
    assert told[0].filename == __file__
    assert [each.name for each in engines.iterdir()] == [CONTEXT]


def test_of_two_processes_that_compile_the_first_ones_model_is_taken(tmp_path: Path) -> None:
    model, engines = save(tmp_path / "model.onnx", "Relu"), tmp_path / "engines"
    engines.mkdir()
    ort = Compiling(lambda: save(engines / CONTEXT / "model.onnx", "Abs"))
    with warnings.catch_warnings(action="error"):
        assert run(model, engines, ort) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("target", "provider", "options"),
    [
        ("nv_tensorrt_rtx", "NvTensorRTRTXExecutionProvider", "rtx_options.json"),
        ("windowsml", "NvTensorRTRTXExecutionProvider", "rtx_options.json"),
        ("windowsml", MIGRAPHX, "migraphx_options.json"),
        ("rocm", MIGRAPHX, "migraphx_options.json"),
    ],
)
def test_every_option_is_one_that_the_provider_knows(target: str, provider: str, options: str) -> None:
    known = json.loads((HERE / options).read_text())["options"]
    given = TARGETS[target].session.options[provider]
    assert given
    assert given.keys() <= set(known)


def test_what_migraphx_compiles_depends_on_amds_versions_and_tensorrts_key_is_as_it_was() -> None:
    assert machine_key(MIGRAPHX)["amd"].keys() == {"architecture", "driver", "rocm"}
    assert list(machine_key(TENSORRT)) == [
        "provider", "device", "compute_capability", "driver", "cuda", "tensorrt", "packages",
    ]  # fmt: skip
