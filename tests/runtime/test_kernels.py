"""Kernels of our own: what they take over, that they compile, and what happens where they cannot be used."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.errors import SlowerWarning, TargetUnavailableError
from sdflow.onnx_model.phases import interleaved
from sdflow.runtime.kernels import compilation, library, proof
from sdflow.runtime.kernels.definitions import CASES
from sdflow.runtime.kernels.float8 import float8_library
from sdflow.runtime.kernels.kept import keep
from sdflow.runtime.kernels.parts import FLOAT8, FOLDER, PART_OF, PARTS, parts_in
from sdflow.runtime.kernels.proof import differences, geglu_difference, gelu_difference, prove
from sdflow.runtime.kernels.replace import DOMAIN, with_own_kernels
from sdflow.runtime.sessions.specialize import specialize

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")

_compiled: dict[tuple[str, ...], bytes] = {}


class CompilesOnce(library.Nvrtc):
    """NVRTC, which takes some seconds for our kernels: what several tests compile, the first one does."""

    def compile(self, source: str, options: list[str]) -> bytes:
        key = (source, *options)
        if key not in _compiled:
            _compiled[key] = super().compile(source, options)
        return _compiled[key]


@pytest.fixture(autouse=True)
def compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "Nvrtc", CompilesOnce)


def group_norm(op_type: str, names: str, outputs: str, **attributes: Any) -> Any:
    given = {"groups": 32, "epsilon": 1e-6, "activation": 1, **attributes}
    return helper.make_node(
        op_type, names.split(), outputs.split(), name=outputs.split()[0], domain="com.microsoft", **given
    )


def model(nodes: list[Any], channels: int, element: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """x (2, 4, 4, channels) through the nodes to y; gamma, beta, bias (channels) and skip as x, gate's bias (channels)."""
    image, row = [2, 4, 4, channels], [channels]
    inputs = [helper.make_tensor_value_info(name, element, image) for name in ("x", "skip")]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, row) for name in ("gamma", "beta")]
    inputs += [helper.make_tensor_value_info("bias", element, row)]
    inner = [name for node in nodes for name in node.output if name != "y"]
    graph = helper.make_graph(nodes, "test", inputs, [helper.make_tensor_value_info("y", element, None)])
    graph.value_info.extend(helper.make_tensor_value_info(name, element, image) for name in inner)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_group_normalizations_become_ours_with_the_sum_where_it_is_read() -> None:
    nodes = [
        group_norm("GroupNorm", "x gamma beta", "a"),
        group_norm("SkipGroupNorm", "a gamma beta skip bias", "b sum", activation=0),
        group_norm("SkipGroupNorm", "b gamma beta sum", "y", channels_last=1),
    ]
    before = model(nodes, 320)
    replaced = with_own_kernels(before)
    assert replaced is not None
    assert [(node.domain, node.op_type) for node in replaced.graph.node] == [(DOMAIN, "GroupNorm")] * 3
    assert [list(node.input) for node in replaced.graph.node] == [list(node.input) for node in nodes]
    assert [list(node.output) for node in replaced.graph.node] == [
        ["a", "a_sums"],
        ["b", "b_sums", "sum"],
        ["y", "y_sums"],
    ]
    attributes = [{item.name for item in node.attribute} for node in replaced.graph.node]
    assert attributes == [{"groups", "epsilon", "activation"}] * 3
    assert {entry.domain for entry in replaced.opset_import} == {"", "com.microsoft", DOMAIN}
    assert before.SerializeToString() == model(nodes, 320).SerializeToString(), "the artifact's graph was changed"


def test_group_normalizations_in_float32_become_ours_and_a_gelu_does_not() -> None:
    nodes = [
        group_norm("GroupNorm", "x gamma beta", "a"),
        group_norm("SkipGroupNorm", "a gamma beta skip bias", "y", channels_last=1),
    ]
    replaced = with_own_kernels(model(nodes, 320, TensorProto.FLOAT))
    assert replaced is not None
    assert [(node.domain, node.op_type) for node in replaced.graph.node] == [(DOMAIN, "GroupNormSingle")] * 2
    gelu = helper.make_node("BiasSplitGelu", ["x", "bias"], ["y"], domain="com.microsoft")
    assert with_own_kernels(model([gelu], 320, TensorProto.FLOAT)) is None


@pytest.mark.parametrize(
    ("channels", "element", "attributes"),
    [
        (64, TensorProto.FLOAT16, {}),  # groups of two channels
        (160, TensorProto.FLOAT16, {}),  # of five: three groups in a vector
        (320, TensorProto.DOUBLE, {}),
        (8192, TensorProto.FLOAT16, {}),
        (512, TensorProto.FLOAT16, {"groups": 64}),
        (320, TensorProto.FLOAT16, {"channels_last": 0}),
    ],
)
def test_what_our_kernels_cannot_do_stays_with_onnxruntime(
    channels: int, element: int, attributes: dict[str, int]
) -> None:
    assert (
        with_own_kernels(model([group_norm("GroupNorm", "x gamma beta", "y", **attributes)], channels, element)) is None
    )


def of_type(graph: onnx.ModelProto, name: str, element: int, shape: list[int]) -> onnx.ModelProto:
    (value,) = (item for item in graph.graph.input if item.name == name)
    value.CopyFrom(helper.make_tensor_value_info(name, element, shape))
    return graph


@pytest.mark.parametrize(
    ("name", "element", "shape"),
    [
        ("gamma", TensorProto.FLOAT16, [320]),
        ("beta", TensorProto.FLOAT, [1]),
        ("bias", TensorProto.FLOAT16, [640]),
        ("skip", TensorProto.FLOAT16, [1, 320]),  # one row for both images
        ("skip", TensorProto.FLOAT, [2, 4, 4, 320]),
        ("skip", TensorProto.FLOAT16, [2, 320, 4, 4]),
    ],
)
def test_inputs_of_other_types_and_shapes_than_our_kernels_read_stay_with_onnxruntime(
    name: str, element: int, shape: list[int]
) -> None:
    node = group_norm("SkipGroupNorm", "x gamma beta skip bias", "y")
    assert with_own_kernels(model([node], 320)) is not None
    assert with_own_kernels(of_type(model([node], 320), name, element, shape)) is None


@pytest.mark.parametrize("shape", [[2, 320], [2, 1, 1, 320]])
def test_a_skip_of_one_row_for_each_image_is_ours(shape: list[int]) -> None:
    node = group_norm("SkipGroupNorm", "x gamma beta skip", "y")
    assert with_own_kernels(of_type(model([node], 320), "skip", TensorProto.FLOAT16, shape)) is not None


def test_initializers_count_as_inputs_do_and_outputs_that_nobody_wants_are_left_out() -> None:
    node = group_norm("SkipGroupNorm", "x gamma beta skip", "y")
    node.input.append("")
    node.output.extend(["", "", "sum"])
    graph = model([node], 320)
    for name in ("gamma", "beta"):
        (given,) = (item for item in graph.graph.input if item.name == name)
        graph.graph.input.remove(given)
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(320, np.float32), name))
    replaced = with_own_kernels(graph)
    assert replaced is not None
    assert list(replaced.graph.node[0].input) == ["x", "gamma", "beta", "skip", ""]
    assert list(replaced.graph.node[0].output) == ["y", "y_sums", "sum"]


def test_bias_split_gelu_becomes_ours_when_its_halves_are_whole_vectors() -> None:
    gelu = helper.make_node("BiasSplitGelu", ["x", "bias"], ["y"], domain="com.microsoft")
    replaced = with_own_kernels(model([gelu], 320))
    assert replaced is not None
    assert [(node.domain, node.op_type) for node in replaced.graph.node] == [(DOMAIN, "BiasSplitGelu")]
    assert with_own_kernels(model([gelu], 24)) is None
    assert with_own_kernels(of_type(model([gelu], 320), "x", TensorProto.FLOAT16, [1, 2, 2, 2, 320])) is None
    assert with_own_kernels(of_type(model([gelu], 320), "bias", TensorProto.FLOAT16, [640])) is None


def put_between(channels: int, element: int = TensorProto.FLOAT16, images: int = 2) -> onnx.ModelProto:
    """x (images, 4, 5, 4 channels) in phases, to y, with all shapes known, as a session of fixed sizes has it."""
    constants = {}

    def constant(name: str, values: Any) -> str:
        constants[name] = onnx.numpy_helper.from_array(values, name)
        return name

    nodes = interleaved("up", "x", "y", channels, constant)
    x = helper.make_tensor_value_info("x", element, [images, 4, 5, 4 * channels])
    y = helper.make_tensor_value_info("y", element, None)
    graph = helper.make_graph(nodes, "test", [x], [y], list(constants.values()))
    return specialize(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {})


@pytest.mark.parametrize(
    ("channels", "element", "images", "op_type"),
    [
        (8, TensorProto.FLOAT16, 2, "InterleavePhases"),
        (4, TensorProto.FLOAT, 2, "InterleavePhasesSingle"),
        (4, TensorProto.FLOAT16, 2, None),  # not whole vectors
        (6, TensorProto.FLOAT, 2, None),
        (8, TensorProto.DOUBLE, 2, None),
        (8, TensorProto.FLOAT16, 65536, None),
    ],
)
def test_phases_are_put_between_one_another_in_one_go(
    channels: int, element: int, images: int, op_type: str | None
) -> None:
    before = put_between(channels, element, images)
    assert len(before.graph.node) == 8
    replaced = with_own_kernels(before)
    if op_type is None:
        assert replaced is None
        return
    assert replaced is not None
    found = [(node.domain, node.op_type, list(node.input), list(node.output)) for node in replaced.graph.node]
    assert found == [(DOMAIN, op_type, ["x"], ["y"])]


def gated(
    x: list[int], weight: list[int], *, element: int = TensorProto.FLOAT16, also: bool = False
) -> onnx.ModelProto:
    """x through MatMul with w and BiasSplitGelu to y. also: the product is a result too."""
    product = [*x[:-1], weight[1]]
    inputs = [helper.make_tensor_value_info(*each) for each in (("x", element, x), ("w", element, weight))]
    inputs.append(helper.make_tensor_value_info("bias", element, weight[1:]))
    results = [helper.make_tensor_value_info("y", element, [*x[:-1], weight[1] // 2])]
    results += [helper.make_tensor_value_info("h", element, product)] if also else []
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
        helper.make_node("BiasSplitGelu", ["h", "bias"], ["y"], "gelu", domain="com.microsoft"),
    ]
    graph = helper.make_graph(nodes, "test", inputs, results)
    graph.value_info.append(helper.make_tensor_value_info("h", element, product))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def operators(
    graph: onnx.ModelProto, *, hopper: bool = True, without: Collection[str] = ()
) -> list[tuple[str, list[str]]]:
    replaced = with_own_kernels(graph, hopper=hopper, without=without)
    return [] if replaced is None else [(node.op_type, list(node.input)) for node in replaced.graph.node]


def test_a_product_and_its_gate_become_one_on_hopper() -> None:
    graph = gated([2, 1024, 1280], [1280, 10240])
    assert operators(graph) == [("Geglu", ["x", "w", "bias"])]
    kept = [("MatMul", ["x", "w"]), ("BiasSplitGelu", ["h", "bias"])]
    assert operators(graph, hopper=False) == kept
    assert operators(gated([2, 1024, 1280], [1280, 10240], also=True)) == kept
    graph.graph.node.append(helper.make_node("Identity", ["h"], ["again"]))
    assert operators(graph)[:2] == kept


def test_phases_behind_a_product_are_found_in_their_places() -> None:
    graph, behind = gated([2, 1024, 1280], [1280, 10240]), put_between(8)
    for name in ("node", "initializer", "value_info"):
        getattr(graph.graph, name).extend(
            [item for item in getattr(behind.graph, name) if getattr(item, "name", "") not in ("x", "y")]
        )
    for node in graph.graph.node[2:]:
        for names in (node.input, node.output):
            names[:] = [{"x": "image", "y": "larger"}.get(name, name) for name in names]
    graph.graph.input.append(helper.make_tensor_value_info("image", TensorProto.FLOAT16, [2, 4, 5, 32]))
    graph.graph.output.append(helper.make_tensor_value_info("larger", TensorProto.FLOAT16, [2, 6, 8, 8]))
    assert operators(graph) == [("Geglu", ["x", "w", "bias"]), ("InterleavePhases", ["image"])]


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ([2, 1024, 1280], [1280, 10304]),  # 80.5 tiles across
        ([2, 1024, 1284], [1284, 10240]),
        ([2, 63, 1280], [1280, 10240]),  # less than a tile
        ([2, 4, 2, 512, 1280], [1280, 10240]),
    ],
)
def test_products_that_geglu_does_not_make_quicker_stay(x: list[int], weight: list[int]) -> None:
    assert "Geglu" not in {operator for operator, _ in operators(gated(x, weight))}


@LINUX
@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize("name", PARTS)
def test_each_part_compiles_by_itself_for_a_gpu_that_is_not_here(name: str, capability: str) -> None:
    code = compilation.compile_part(name, library.Nvrtc(), compilation.architecture(capability))
    known = {match.decode() for match in re.findall(rb"\0\.text\.(\w+)", code)}
    if capability == "90":
        assert known == KERNELS_OF[name]
    elif PARTS[name].hopper or name == FLOAT8:
        assert not known
    else:
        newer = ("float8_", "group_norm_held_")  # float8 from 8.9 on, clusters of blocks from 9.0 on
        assert known == {kernel for kernel in KERNELS_OF[name] if not kernel.startswith(newer)}


def kernels_of() -> dict[str, set[str]]:
    """Part -> the kernels that custom_ops.c looks for in it."""
    text = (FOLDER / "custom_ops.c").read_text()
    cases = re.split(r"case PART_(\w+):", text[text.index("switch (part)") : text.index("case PART_COUNT")])[1:]
    found = {part: set(re.findall(r'"(\w+)"', body)) for part, body in zip(cases[::2], cases[1::2], strict=True)}
    table = re.findall(r"KERNEL\((\d+), (\d+), (\w+),", (FOLDER / "few_keys_attention.h").read_text())
    found["few_keys_attention"] = {"few_keys_attention_" + "_".join(row) for row in table}
    return found


KERNELS_OF = kernels_of()


def test_each_operator_is_of_one_part_and_has_kernels() -> None:
    text = "".join(path.read_text() for path in compilation.OPERATORS)
    for part in PARTS.values():
        assert KERNELS_OF[part.name]
        assert f"load_kernels(PART_{part.name})" in text
        for operator in part.operators:
            assert PART_OF[operator] == part.name
            assert f'"{operator}"' in text


@LINUX
def test_the_operators_compile_and_three_functions_are_to_be_seen(tmp_path: Path) -> None:
    compilation.compile_operators(tmp_path, flags=["-Wall", "-Wextra", "-Werror"])
    command = ["nm", "-D", "--defined-only", str(tmp_path / "libsdflow_kernels.so")]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert symbols.split()[2::3] == ["RegisterCustomOps", "sdflow_give_code", "sdflow_moved_bytes"], symbols


@LINUX
def test_onnxruntime_takes_our_operators_and_knows_their_types(tmp_path: Path) -> None:
    """On the CPU, where they have no kernel: ONNX Runtime resolves them, and then looks for a kernel in float32."""
    import onnxruntime

    compilation.compile_operators(tmp_path)
    made = tmp_path / "libsdflow_kernels.so"

    def refusal(graph: Any, *, registered: bool = True, element: int = TensorProto.FLOAT16) -> str:
        wanted = with_own_kernels(graph, hopper=True)
        assert wanted is not None
        for item in (*wanted.graph.input, *wanted.graph.output):
            if item.type.tensor_type.elem_type == TensorProto.FLOAT16:
                item.type.tensor_type.elem_type = element
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if registered:
            options.register_custom_ops_library(str(made))
        with pytest.raises(Exception) as raised:  # ONNX Runtime's have no common base
            onnxruntime.InferenceSession(wanted.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return str(raised.value)

    norm = group_norm("SkipGroupNorm", "x gamma beta skip bias", "y")
    gelu = helper.make_node("BiasSplitGelu", ["x", "bias"], ["y"], domain="com.microsoft")
    residual = [
        helper.make_node("Mul", ["bias", "skip"], ["a"]),
        helper.make_node("Add", ["x", "a"], ["b"]),
        helper.make_node("Identity", ["b"], ["y"]),
    ]
    graphs = [model(nodes, 320) for nodes in ([norm], [gelu], residual)]
    for graph in (*graphs, put_between(8), gated([2, 1024, 1280], [1280, 10240])):
        assert "not a registered function/op" in refusal(graph, registered=False)
        assert "tensor(double)" in refusal(graph, element=TensorProto.DOUBLE)
        assert "InsertedPrecisionFreeCast" in refusal(graph)


@LINUX
@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("#!/bin/sh\nprintf 'sch\\366n' >&2; exit 1\n", "sch.n"),  # not UTF-8
        ("no program", "Exec format error"),
        ("#!/bin/sh\nexec sleep 60\n", "timed out"),
    ],
)
def test_a_c_compiler_that_fails_is_told_as_that(
    compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "SLOWEST", 2)
    path = tmp_path / "compiler"
    path.write_text(compiler)
    path.chmod(0o755)
    with pytest.raises(TargetUnavailableError, match=f"compiler cannot compile the operators: .*{said}"):
        compilation.compile_operators(tmp_path, str(path))


@LINUX
def test_source_that_does_not_compile_is_told_in_the_compilers_words() -> None:
    with pytest.raises(TargetUnavailableError, match="not_a_type"):
        library.Nvrtc().compile("__global__ void f(not_a_type x) {}", ["--gpu-architecture=sm_90"])


def test_without_a_device_a_warning_says_why_and_onnxruntimes_kernels_run() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.warns(SlowerWarning, match=r"ONNX Runtime's own kernels run.*(no CUDA device|require Linux)"):
        assert library._process_kernels.__wrapped__() is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library would lie, for a GPU that torch claims and ONNX Runtime does not have."""
    import onnxruntime
    import torch

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("the kernels might run")
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sdflow" / "kernels"


@LINUX
def test_a_further_gpus_library_that_cannot_be_stored_is_copied_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.FOLDER_VARIABLE, str(tmp_path))
    first = library.operator_library()
    first.with_name("libsdflow_kernels-1.so").mkdir()  # root may write to a read-only folder
    before = names(tmp_path)
    second = library.operator_library(1)
    assert library.operator_library(1) == second, "each path is loaded as a library of its own"
    assert tmp_path not in second.parents
    assert second.read_bytes() == first.read_bytes()
    assert names(tmp_path) == before
    assert library.operator_library(2).parent == first.parent


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


@LINUX
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_only_what_is_wanted_is_compiled_and_what_proves_wrong_is_not_used(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library._process_kernels.cache_clear()
    try:
        with pytest.warns(
            SlowerWarning, match=r"in place of BiasSplitGelu: sdflow's kernels do not run on this device"
        ):
            ready = library.kernel_library(["bias_split_gelu"])
        assert ready is not None
        assert ready.wrong.keys() == {"bias_split_gelu"}
        kept = {f"{name}{end}" for name in ("libsdflow_kernels.so", "bias_split_gelu.cubin") for end in ("", ".json")}
        assert names(cache) == kept
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library.kernel_library(["bias_split_gelu"]) == ready, "proved again, or told again"
    finally:
        library._process_kernels.cache_clear()
    with pytest.raises(TargetUnavailableError, match="BiasSplitGelu: sdflow's kernels do not run on this device"):
        library.build(["bias_split_gelu"])
    assert names(cache) == kept
    assert capsys.readouterr().out == ""


@LINUX
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_what_is_kept_is_taken_without_compilers_and_what_is_damaged_is_made_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[str] = []

    def right(_: Path, part: str) -> dict[str, float]:
        proved.append(part)
        return {part: 0.0}

    monkeypatch.setattr(proof, "prove", right)  # there is no GPU to prove it on
    made = library.build(["interleave"])
    (cubin,) = cache.rglob("*.cubin")
    (verdict,) = cache.rglob("*.proved")
    contents = {path: path.read_bytes() for path in (made, cubin, verdict)}
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.setattr(library.Nvrtc, "compile", None)
        assert library.build(["interleave"]) == made
    assert proved == ["interleave"], "proved again in spite of the verdict"

    (cubin.parent / "unfinished-by-a-process-that-was-killed").mkdir()
    for path, content in contents.items():
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        path.unlink()  # this process has the library open
        path.write_bytes(changed)
    library.build(["interleave"])
    assert {path: path.read_bytes() for path in contents if path != made} == {
        path: content for path, content in contents.items() if path != made
    }
    assert made.read_bytes()[:4] == b"\x7fELF"
    assert len(proved) == 2
    assert not list(cache.rglob("unfinished*"))
    for path in contents:  # another's, with a record that is right for itself
        keep(path, b"\x7fELF another's", "another key")
    library.build(["interleave"])
    assert cubin.read_bytes() == contents[cubin]
    assert made.stat().st_size > 10000


def test_a_part_that_is_wrong_is_left_to_onnxruntime_and_the_others_are_ours() -> None:
    graph = gated([2, 1024, 1280], [1280, 10240])
    assert operators(graph, without=["geglu"]) == [("MatMul", ["x", "w"]), ("BiasSplitGelu", ["h", "bias"])]
    assert operators(graph, without=["bias_split_gelu"]) == []
    assert with_own_kernels(put_between(8), without=["interleave"]) is None
    nodes = [
        group_norm("GroupNorm", "x gamma beta", "a"),
        helper.make_node("BiasSplitGelu", ["a", "bias"], ["y"], domain="com.microsoft"),
    ]
    replaced = with_own_kernels(model(nodes, 320), without=["group_norm"])
    assert replaced is not None
    assert [(node.domain, node.op_type) for node in replaced.graph.node] == [
        ("com.microsoft", "GroupNorm"),
        (DOMAIN, "BiasSplitGelu"),
    ]
    assert parts_in(replaced.graph.node) == {"bias_split_gelu"}


@LINUX
def test_what_is_missing_is_told_with_what_to_do(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warning() -> str:
        with pytest.warns(SlowerWarning, match="ONNX Runtime's own kernels run") as caught:
            assert library._process_kernels.__wrapped__() is None
        return str(caught[0].message)

    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "Install gcc or clang" in warning()
    with monkeypatch.context() as patch:
        (tmp_path / "file").touch()
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "cannot be written" in warning()
        assert "SDFLOW_KERNELS=FOLDER" in warning()
    with monkeypatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        patch.delenv("HOME")
        patch.setattr("pwd.getpwuid", {}.__getitem__)
        assert "SDFLOW_KERNELS=FOLDER" in warning()
    with monkeypatch.context() as patch:
        patch.setattr(library, "OLDEST", (10, 0))
        assert "NVIDIA H200 has compute capability 9.0" in warning()
    assert not names(cache)


@pytest.mark.gpu
def test_the_kernels_are_right_on_this_gpu() -> None:
    built = library.build()
    for name in PARTS:
        if library.on_hopper() or not PARTS[name].hopper:
            assert prove(built, name) if name != FLOAT8 else prove(float8_library(), name)
    worst = max(max(differences(built, case).values()) for case in CASES)
    assert worst < 4e-4
    assert gelu_difference(built, (2, 4096, 2560)) < 4e-4
    if library.on_hopper():
        assert geglu_difference(built, (2, 1024, 1280, 5120)) < 4e-4


@pytest.mark.gpu
def test_a_captured_session_gives_what_onnxruntimes_kernels_give(tmp_path: Path) -> None:
    from sdflow.runtime.sessions.session import LoadOptions, create_session
    from sdflow.runtime.sessions.tuning import Tuning
    from sdflow.targets import TARGETS

    nodes = [
        group_norm("GroupNorm", "x gamma beta", "a"),
        group_norm("SkipGroupNorm", "a gamma beta skip bias", "b sum", activation=0),
        helper.make_node("Add", ["b", "sum"], ["y"], name="add"),
    ]
    graph = model(nodes, 320)
    path = tmp_path / "model.onnx"
    onnx.save(graph, path)
    random = np.random.default_rng(0)
    feeds = {
        item.name: random.normal(size=[axis.dim_value for axis in item.type.tensor_type.shape.dim])
        for item in graph.graph.input
    }
    results = []
    for own in (True, False):
        session = create_session(path, TARGETS["cuda"], LoadOptions(tuning=Tuning(own_kernels=own)), graph=graph)
        types = {value.name: np.float16 if "16" in value.type else np.float32 for value in session.get_inputs()}
        counted = Counter(
            node.domain for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
        )
        assert counted[DOMAIN] == (2 if own else 0)
        results.append(
            session.run(None, {name: value.astype(types[name]) for name, value in feeds.items()})[0].astype(np.float32)
        )
    assert np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1]) < 1e-3
