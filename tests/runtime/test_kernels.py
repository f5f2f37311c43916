"""Kernels of our own: what they take over, that they compile, and what happens where they cannot be used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.errors import TargetUnavailableError
from sdflow.runtime.kernels import library
from sdflow.runtime.kernels.proof import CASES, differences, gelu_difference, prove
from sdflow.runtime.kernels.replace import DOMAIN, with_own_kernels

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")


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


@pytest.mark.parametrize(
    ("channels", "element", "attributes"),
    [
        (64, TensorProto.FLOAT16, {}),  # groups of two channels
        (160, TensorProto.FLOAT16, {}),  # of five: three groups in a vector
        (320, TensorProto.FLOAT, {}),
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


def test_bias_split_gelu_becomes_ours_when_its_halves_are_whole_vectors() -> None:
    gelu = helper.make_node("BiasSplitGelu", ["x", "bias"], ["y"], domain="com.microsoft")
    replaced = with_own_kernels(model([gelu], 320))
    assert replaced is not None
    assert [(node.domain, node.op_type) for node in replaced.graph.node] == [(DOMAIN, "BiasSplitGelu")]
    assert with_own_kernels(model([gelu], 24)) is None


@LINUX
@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(capability: str, tmp_path: Path) -> None:
    made = library.compile_library(
        tmp_path, library.Nvrtc(), shutil.which("cc") or "cc", capability, ["-Wall", "-Wextra", "-Werror"]
    )
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(made)], capture_output=True, text=True, check=True
    ).stdout
    assert symbols.split()[-1:] == ["RegisterCustomOps"], symbols


@LINUX
def test_onnxruntime_takes_our_operators_and_knows_their_types(tmp_path: Path) -> None:
    """On the CPU, where they have no kernel: ONNX Runtime resolves them, and then looks for a kernel in float32."""
    import onnxruntime

    made = library.compile_library(tmp_path, library.Nvrtc(), shutil.which("cc") or "cc", "90")

    def refusal(node: Any, *, registered: bool = True, element: int = TensorProto.FLOAT16) -> str:
        wanted = with_own_kernels(model([node], 320))
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
    for node in (norm, gelu):
        assert "not a registered function/op" in refusal(node, registered=False)
        assert "tensor(double)" in refusal(node, element=TensorProto.DOUBLE)
        assert "InsertedPrecisionFreeCast" in refusal(node)


@LINUX
def test_source_that_does_not_compile_is_told_in_the_compilers_words() -> None:
    with pytest.raises(TargetUnavailableError, match="not_a_type"):
        library.Nvrtc().compile("__global__ void f(not_a_type x) {}", ["--gpu-architecture=sm_90"])


def test_without_a_device_a_warning_says_why_and_onnxruntimes_kernels_run() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.warns(UserWarning, match=r"ONNX Runtime's own kernels run.*(no CUDA device|for Linux)"):
        assert library.kernel_library.__wrapped__() is None


@pytest.mark.gpu
def test_the_kernels_are_right_on_this_gpu() -> None:
    built = library.build()
    prove(built)
    worst = max(max(differences(built, case).values()) for case in CASES)
    assert worst < 4e-4
    assert gelu_difference(built, (2, 4096, 2560)) < 4e-4


@pytest.mark.gpu
def test_a_captured_session_gives_what_onnxruntimes_kernels_give(tmp_path: Path) -> None:
    from sdflow.runtime.sessions import create_session
    from sdflow.runtime.tuning import Tuning
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
        session = create_session(path, TARGETS["cuda"], graph=graph, tuning=Tuning(own_kernels=own))
        types = {value.name: np.float16 if "16" in value.type else np.float32 for value in session.get_inputs()}
        counted = Counter(
            node.domain for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
        )
        assert counted[DOMAIN] == (2 if own else 0)
        results.append(
            session.run(None, {name: value.astype(types[name]) for name, value in feeds.items()})[0].astype(np.float32)
        )
    assert np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1]) < 1e-3
