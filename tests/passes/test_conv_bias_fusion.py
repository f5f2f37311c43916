"""ConvBiasFusion gives what the graph gave before, with fewer convolutions that have a bias, and says which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.conv_bias_fusion import ConvBiasFusion
from sdflow.verify.lowering import lower, session_of
from tests.passes.one_pass import edited

RANDOM = np.random.default_rng(0)
MICROSOFT = "com.microsoft"


def run(model: Any, folder: Path, feeds: dict[str, Any]) -> Any:
    return session_of(lower(model), folder, threads=1).run(None, feeds)


def convolution(name: str, value: str, result: str, channels: int, weights: list[Any], bias: bool = True) -> Any:
    """An NhwcConv of size 1 with a weight of its own."""
    weights.append(numpy_helper.from_array(RANDOM.normal(0, 0.1, (channels, 1, 1, 8)).astype(np.float32), f"{name}.w"))
    inputs = [value, f"{name}.w"]
    if bias:
        weights.append(numpy_helper.from_array(RANDOM.normal(0, 1, channels).astype(np.float32), f"{name}.b"))
        inputs.append(f"{name}.b")
    return helper.make_node("NhwcConv", inputs, [result], name, domain=MICROSOFT, kernel_shape=[1, 1])


def norm(kind: str, inputs: Sequence[str], outputs: Sequence[str], channels: int, weights: list[Any]) -> Any:
    for which in ("gamma", "beta"):
        values = RANDOM.normal(1, 0.1, channels).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"{outputs[0]}.{which}"))
    first, *rest = inputs
    named = [first, f"{outputs[0]}.gamma", f"{outputs[0]}.beta", *rest]
    options = {"groups": 4, "activation": 1, "epsilon": 1e-5, "channels_last": 1}
    return helper.make_node(kind, named, list(outputs), outputs[0], domain=MICROSOFT, **options)


def graph(nodes: Sequence[Any], weights: Sequence[Any], outputs: dict[str, Sequence[int | str]]) -> Any:
    """A model of input x (batch, 6, 5, 8)."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6, 5, 8])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(
        helper.make_graph(list(nodes), "test", [x], results, list(weights)), opset_imports=opsets, ir_version=8
    )


def transpose(value: str, result: str) -> Any:
    return helper.make_node("Transpose", [value], [result], result, perm=[0, 3, 1, 2])


def assert_same(before: Any, after: Any, folder: Path, batch: int = 2) -> None:
    feeds = {"x": RANDOM.standard_normal((batch, 6, 5, 8)).astype(np.float32)}
    for old, new in zip(run(before, folder, feeds), run(after, folder, feeds), strict=True):
        assert old.std() > 0.1
        np.testing.assert_allclose(new, old, rtol=0, atol=3e-6)


def biases(model: Any) -> dict[str, bool]:
    return {node.name: len(node.input) == 3 for node in model.graph.node if node.op_type == "NhwcConv"}


def residual(width: int, *, both: bool) -> Any:
    """Two convolutions, or one and a convolution without a bias, added in NCHW, as an up block does."""
    weights: list[Any] = []
    nodes = [
        convolution("main", "x", "a", width, weights),
        convolution("shortcut", "x", "b", width, weights, bias=both),
        transpose("a", "a_nchw"),
        transpose("b", "b_nchw"),
        helper.make_node("Add", ["b_nchw", "a_nchw"], ["y"], "add"),
    ]
    return graph(nodes, weights, {"y": ["batch", width, 6, 5]})


def test_skip_group_norm_adds_the_biases_of_both_its_convolutions(tmp_path: Path) -> None:
    weights: list[Any] = []
    nodes = [
        convolution("main", "x", "a", 8, weights),
        convolution("shortcut", "x", "b", 8, weights),
        norm("SkipGroupNorm", ["a", "b"], ["y", "sum"], 8, weights),
    ]
    before = graph(nodes, weights, {"y": ["batch", 6, 5, 8], "sum": ["batch", 6, 5, 8]})
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert (facts["folded"], facts["kept"]) == ({"SkipGroupNorm": 2}, 0)
    assert not any(biases(after).values())
    assert_same(before, after, tmp_path)


def test_a_bias_that_skip_group_norm_has_already_is_added_to(tmp_path: Path) -> None:
    weights: list[Any] = [numpy_helper.from_array(RANDOM.normal(0, 1, 8).astype(np.float32), "own")]
    nodes = [
        convolution("main", "x", "a", 8, weights),
        norm("SkipGroupNorm", ["x", "a", "own"], ["y", "sum"], 8, weights),
    ]
    before = graph(nodes, weights, {"y": ["batch", 6, 5, 8]})
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert facts["folded"] == {"SkipGroupNorm": 1}
    assert_same(before, after, tmp_path)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("width", [320, 640])
def test_a_residual_becomes_bias_add(tmp_path: Path, width: int, both: bool) -> None:
    before = residual(width, both=both)
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert (facts["folded"], facts["kept"]) == ({"BiasAdd": 1 + both}, 0)
    assert facts["operators"]["BiasAdd"] == 1 and "Add" not in facts["operators"]
    assert_same(before, after, tmp_path, batch=3)


def test_bias_add_has_no_kernel_for_other_widths_so_one_convolution_keeps_a_bias_for_both(tmp_path: Path) -> None:
    before = residual(24, both=True)
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert (facts["folded"], facts["kept"]) == ({"Add": 1}, 1)
    assert "BiasAdd" not in facts["operators"]
    assert_same(before, after, tmp_path)


def test_group_norm_takes_a_bias_when_asked(tmp_path: Path) -> None:
    weights: list[Any] = []
    nodes = [convolution("main", "x", "a", 8, weights), norm("GroupNorm", ["a"], ["y"], 8, weights)]
    before = graph(nodes, weights, {"y": ["batch", 6, 5, 8]})
    with pytest.raises(PassError, match="none of 1 biases"):
        edited(ConvBiasFusion, before, tmp_path / "off")
    after, facts = edited(ConvBiasFusion, before, tmp_path / "on", group_norm=True)
    assert facts["folded"] == {"GroupNorm": 1}
    assert facts["operators"]["SkipGroupNorm"] == 1 and "GroupNorm" not in facts["operators"]
    for batch in (1, 3):
        assert_same(before, after, tmp_path, batch)


def positions(weights: list[Any], *, width: int = 8, axis: int = -1) -> list[Any]:
    """A transformer's beginning: convolution, positions in a row, LayerNormalization; the positions are read again, and
    the feature map's shape behind a Transpose, as exporters do it."""
    for which in ("gamma", "beta"):
        weights.append(numpy_helper.from_array(RANDOM.normal(1, 0.1, width).astype(np.float32), which))
    weights.append(numpy_helper.from_array(np.array([-1, 30 * 8 // width, width], np.int64), "sizes"))
    return [
        convolution("proj_in", "x", "a", 8, weights),
        transpose("a", "a_nchw"),
        helper.make_node("Shape", ["a_nchw"], ["shape"], "shape"),
        helper.make_node("Reshape", ["a", "sizes"], ["t"], "positions"),
        helper.make_node("LayerNormalization", ["t", "gamma", "beta"], ["normal"], "norm", axis=axis, epsilon=1e-3),
        helper.make_node("Add", ["normal", "t"], ["y"], "residual"),
    ]


def test_layer_normalization_and_the_residual_behind_it_get_the_bias(tmp_path: Path) -> None:
    weights: list[Any] = []
    before = graph(positions(weights), weights, {"y": ["batch", 30, 8], "t": ["batch", 30, 8]})
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert (facts["folded"], facts["kept"]) == ({"LayerNormalization": 1}, 0)
    assert facts["operators"]["SkipLayerNormalization"] == 1 and "LayerNormalization" not in facts["operators"]
    for batch in (1, 3):
        assert_same(before, after, tmp_path, batch)


def test_onnx_runtimes_kernel_takes_a_bias_for_a_skip() -> None:
    """Its check of the shapes is the one that CUDA's kernel makes too."""
    import onnxruntime

    rows, skip = RANDOM.standard_normal((6, 1, 8)), RANDOM.standard_normal((1, 1, 8))
    node = helper.make_node("SkipLayerNormalization", ["x", "b", "g"], ["y", "", "", "sum"], domain=MICROSOFT)
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "b", "g", "y", "sum")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(
        helper.make_graph([node], "test", kinds[:3], kinds[3:]), opset_imports=opsets, ir_version=8
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": rows, "b": skip, "g": np.ones(8)}
    y, total = session.run(None, {name: value.astype(np.float32) for name, value in feeds.items()})
    np.testing.assert_allclose(total, rows + skip, atol=1e-6)
    np.testing.assert_allclose(y.std(axis=-1), 1, atol=1e-3)


@pytest.mark.parametrize("options", [{"width": 4}, {"axis": 1}], ids=["other width", "other axis"])
def test_layer_normalization_of_something_else_is_left_alone(tmp_path: Path, options: dict[str, int]) -> None:
    weights: list[Any] = []
    nodes = positions(weights, **options)
    before = graph(nodes, weights, {"y": ["batch", "positions", "channels"]})
    with pytest.raises(PassError, match="none of 1 biases"):
        edited(ConvBiasFusion, before, tmp_path)


def test_a_convolution_that_others_read_keeps_its_bias(tmp_path: Path) -> None:
    weights: list[Any] = []
    nodes = [
        convolution("read_twice", "x", "a", 8, weights),
        convolution("result", "x", "b", 8, weights),
        convolution("alone", "x", "c", 8, weights),
        norm("SkipGroupNorm", ["a", "b"], ["y"], 8, weights),
        norm("SkipGroupNorm", ["c", "a"], ["z"], 8, weights),
    ]
    shape = ["batch", 6, 5, 8]
    before = graph(nodes, weights, {"y": shape, "z": shape, "b": shape})
    after, facts = edited(ConvBiasFusion, before, tmp_path)
    assert facts["folded"] == {"SkipGroupNorm": 1}
    assert biases(after) == {"read_twice": True, "result": True, "alone": False}
    assert_same(before, after, tmp_path)


def test_a_model_without_such_convolutions_is_an_error(tmp_path: Path) -> None:
    weights: list[Any] = []
    before = graph([convolution("a", "x", "y", 8, weights, bias=False)], weights, {"y": ["batch", 6, 5, 8]})
    with pytest.raises(PassError, match="no NhwcConv with a bias"):
        edited(ConvBiasFusion, before, tmp_path)


def test_a_unet_gives_what_it_gave(fused_unet: Any, tiny_unet: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    facts = ConvBiasFusion().run(PassInputs("unet", fused_unet.path, {}), out, ConvBiasFusion.Config())
    before = onnx.load(str(fused_unet.path / "model.onnx"), load_external_data=False)
    after = onnx.load(str(out / "model.onnx"), load_external_data=False)
    old, new = run(before, fused_unet.path, tiny_unet.feeds)[0], run(after, out, tiny_unet.feeds)[0]
    had = sum(biases(before).values())
    assert facts["kept"] == sum(biases(after).values()) == had - sum(facts["folded"].values())
    assert facts["folded"]["SkipGroupNorm"] >= 10
    assert facts["folded"]["LayerNormalization"] >= 3
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())
