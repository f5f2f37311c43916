"""Where engines of TensorRT and MIGraphX are kept, and what TensorRT's provider is told. The provider is not here: a stand-in for
ONNX Runtime records what would be asked of it, and its options are held to those that stand in its library."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from shell import Shell
from started_python import StartedPython

from sdflow.errors import SlowerWarning, UsageError
from sdflow.families import DEFAULT, FAMILIES
from sdflow.runtime.sessions import engine_cache
from sdflow.runtime.sessions import session as sessions
from sdflow.runtime.sessions.engine_cache import TENSORRT, Profile, engine_folders
from sdflow.runtime.sessions.place import Place
from sdflow.runtime.sessions.session import LoadOptions, create_session, provider_options
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.targets import TARGETS

OPTIONS = json.loads((Path(__file__).parent / "tensorrt_options.json").read_text())["options"]
TARGET = TARGETS["tensorrt"]
SHAPES = {"sample": (2, 4, 64, 64), "timestep": (1,)}


class Recorder:
    """Stands where ONNX Runtime does: keeps what sessions are asked for, and makes none of TensorRT's."""

    def __init__(self) -> None:
        self.asked: list[dict[str, dict[str, str]]] = []
        for name in ("SessionOptions", "ExecutionMode", "GraphOptimizationLevel"):
            setattr(self, name, getattr(onnxruntime, name))

    def get_available_providers(self) -> list[str]:
        return [TENSORRT, "CUDAExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, source: str, options: Any, providers: Any, **more: Any) -> Any:
        self.asked.append(dict(providers))
        return SimpleNamespace(get_providers=lambda: [name for name, _ in providers])

    @property
    def last(self) -> dict[str, str]:
        return self.asked[-1][TENSORRT]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(sessions, "onnxruntime_for", lambda target: (made, TENSORRT))
    for name in ("_load_cuda", "_load_tensorrt", "_require_cudnn"):
        monkeypatch.setattr(sessions, name, lambda *given: None)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sample = helper.make_tensor_value_info("sample", TensorProto.FLOAT, ["batch", 4, "rows", "columns"])
    timestep = helper.make_tensor_value_info("timestep", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("out_sample", TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node("Add", ["sample", "timestep"], ["out_sample"])], "g", [sample, timestep], [result]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx"
    )
    return tmp_path / "model.onnx"


def test_every_option_is_one_that_the_provider_knows(recorder: Recorder, model: Path, tmp_path: Path) -> None:
    create_session(model, TARGET, LoadOptions(tmp_path / "engines"), artifact="a" * 64, profile=Profile.of(SHAPES))
    assert recorder.last and recorder.last.keys() <= set(OPTIONS)
    assert recorder.last["trt_profile_opt_shapes"] == "sample:2x4x64x64", "timestep has no free axis"
    assert all(recorder.last[f"trt_profile_{each}_shapes"] == "sample:2x4x64x64" for each in ("min", "max"))
    assert recorder.last["trt_engine_cache_enable"] == recorder.last["trt_timing_cache_enable"] == "1"
    engines, timing = (Path(recorder.last[f"trt_{each}_cache_path"]) for each in ("engine", "timing"))
    assert engines.is_dir() and timing.is_dir() and engines.parent == timing.parent
    assert list(recorder.asked[-1]) == [TENSORRT, "CUDAExecutionProvider"]


def test_without_a_digest_nothing_is_kept(recorder: Recorder, model: Path, tmp_path: Path) -> None:
    create_session(model, TARGET, LoadOptions(tmp_path / "engines"))
    assert recorder.last == {"trt_fp16_enable": "1"}
    assert provider_options(TARGETS["rocm"], "MIGraphXExecutionProvider", None) == {}
    assert not (tmp_path / "engines").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def made(model: str = "a", shapes: Any = SHAPES, provider: str = TENSORRT) -> tuple[Path, Path]:
        found = engine_folders(tmp_path, TARGET, provider, model, Profile.of(shapes))
        return found.engines, found.timing

    return made


def test_two_models_share_timings_and_no_engine(folder: Callable[..., tuple[Path, Path]]) -> None:
    """The provider would take the engine of one checkpoint for another's: it is called by the names of nodes."""
    first, timing = folder()
    assert folder() == (first, timing)
    assert folder("b") != (first, timing) and folder("b")[1] == timing
    assert folder(shapes={"sample": (2, 4, 32, 32), "timestep": (1,)})[0] != first
    assert json.loads((first / "model.json").read_text())["model"] == "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("driver_version", "580.159.04"),
        ("tensorrt_version", 101500),
        ("_compute_capability", "9.0"),
        ("cuda_device", {"accelerator": "NVIDIA H200"}),
        ("cuda_device", {"cuda": "13.0"}),
        ("installed_versions", {"onnxruntime-gpu": "1.31.1"}),
    ],
)
def test_device_driver_and_versions_are_in_the_key(
    name: str, value: Any, folder: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, timing = folder()
    monkeypatch.setattr(engine_cache, "_compute_capability", lambda: None)
    monkeypatch.setattr(engine_cache, name, lambda *given: value)
    there, other_timing = folder()
    assert here.parent != there.parent and timing != other_timing
    assert (
        str(value if isinstance(value, (int, str)) else next(iter(value.values())))
        in (there.parent / "machine.json").read_text()
    )


def test_engines_are_in_the_users_folder_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_cache.FOLDER_VARIABLE, str(tmp_path / "mine"))
    assert (tmp_path / "mine") in engine_folders(None, TARGET, TENSORRT, "a").engines.parents
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no engines can be stored there"):
        engine_folders(tmp_path / "file", TARGET, TENSORRT, "a")


def test_a_profile_grows_with_what_is_drawn(recorder: Recorder, model: Path, tmp_path: Path) -> None:
    part = FAMILIES[DEFAULT].part("unet")

    def load(wanted: Any, graph: Any = None, capture: bool = False, edits: Any = (), profile: Any = None) -> Any:
        return create_session(model, TARGET, LoadOptions(tmp_path / "engines"), artifact="a", profile=profile)

    submodel = Submodel(load, part, {}, Place("cpu"), profiles=True)
    first = submodel.load(SHAPES)
    assert submodel.load(SHAPES) is first, "an engine is built once"
    with pytest.warns(SlowerWarning, match="unet: building an engine for more sizes"):
        wider = submodel.load({"sample": (4, 4, 64, 32), "timestep": (1,)})
    assert wider is not first
    assert recorder.last["trt_profile_min_shapes"] == "sample:2x4x64x32"
    assert recorder.last["trt_profile_opt_shapes"] == "sample:4x4x64x64"
    assert recorder.last["trt_profile_max_shapes"] == "sample:4x4x64x64"
    assert submodel.load({"sample": (3, 4, 64, 48), "timestep": (1,)}) is wider, "between the two"
    assert len(recorder.asked) == 2


def test_whichever_size_came_first_the_engine_is_the_same(
    folder: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    sizes = [{"sample": (2, 4, *each), "timestep": (1,)} for each in ((64, 64), (96, 64), (64, 128))]
    found = set()
    for order in permutations(sizes):
        profile = Profile.of(order[0])
        for shapes in order[1:]:
            profile = profile.with_shapes(shapes)
        assert all(profile.with_shapes(shapes) is profile for shapes in sizes)
        found.add(engine_folders(tmp_path, TARGET, TENSORRT, "a", profile).engines)
    assert len(found) == 1


@pytest.fixture
def partly_taken(tmp_path: Path) -> Path:
    """A graph of three parts: the middle one is an operator that no parser of TensorRT knows."""
    sample = helper.make_tensor_value_info("sample", TensorProto.FLOAT, ["batch", 4, "rows", "columns"])
    nodes = [
        helper.make_node("Transpose", ["sample"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("QuickGelu", ["last"], ["active"], domain="com.microsoft"),
        helper.make_node("Transpose", ["active"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("AveragePool", ["first"], ["pooled,all"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Relu", ["pooled,all"], ["out_sample"]),
    ]
    result = helper.make_tensor_value_info("out_sample", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [sample], [result])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "partly.onnx")
    return tmp_path / "partly.onnx"


def test_what_lies_between_parts_of_a_graph_is_in_the_profile(recorder: Recorder, partly_taken: Path) -> None:
    """Where the parser takes only parts, the provider wants the shapes of their inputs, which are values of the graph."""
    profile = Profile.of({"sample": (2, 4, 64, 64)}).with_shapes({"sample": (4, 4, 32, 64)})
    create_session(partly_taken, TARGET, profile=profile)
    said = {word: recorder.last[f"trt_profile_{word}_shapes"].split(",") for word in ("min", "opt", "max")}
    assert set(said["min"]) == {"sample:2x4x32x64", "last:2x32x64x4", "active:2x32x64x4", "first:2x4x32x64"}
    assert set(said["max"]) == set(said["opt"])
    assert set(said["max"]) == {"sample:4x4x64x64", "last:4x64x64x4", "active:4x64x64x4", "first:4x4x64x64"}


def test_of_an_operator_that_nobody_knows_the_inputs_shapes_are_told(recorder: Recorder, partly_taken: Path) -> None:
    model = onnx.load(partly_taken)
    model.graph.node[1].op_type = "Strange"
    onnx.save(model, partly_taken)
    create_session(partly_taken, TARGET, profile=Profile.of({"sample": (2, 4, 64, 64)}))
    assert recorder.last["trt_profile_min_shapes"] == "sample:2x4x64x64"


def test_engines_are_listed_and_removed(
    started_python: StartedPython | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, root = Shell(tmp_path, started_python), tmp_path / "home/.cache/sdflow/engines"
    monkeypatch.setattr(engine_cache, "driver_version", lambda: "580.1")
    for model in ("a", "b"):
        found = engine_folders(root, TARGET, TENSORRT, model, Profile.of(SHAPES))
        (found.engines / "graph.engine").write_bytes(b"x" * 5000)
    (root / "of somebody else").mkdir()
    (root / "of somebody else" / "file").touch()
    (listed,) = json.loads(shell.run("cache", "engines", "--json").stdout)["engines"]
    assert (listed["provider"], listed["driver"], listed["models"]) == (TENSORRT, "580.1", 2)
    assert listed["bytes"] > 10000
    refused = shell.run("cache", "engines", "--clear")
    assert refused.returncode == 2 and "standard input is not a terminal" in refused.stderr
    assert found.engines.is_dir()
    done = shell.run("cache", "engines", "--clear", "--yes")
    assert (done.returncode, done.stderr) == (0, "") and f"kB in {root}" in done.stdout
    assert [path.name for path in root.iterdir()] == ["of somebody else"], "what is none of ours stays"
