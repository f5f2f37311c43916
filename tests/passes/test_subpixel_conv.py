"""SubpixelConv computes what upsampling and convolving computes, and leaves every other Resize alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sdflow.errors import PassError
from sdflow.onnx_model.phases import Interleaving, interleavings
from sdflow.passes.subpixel_conv import SubpixelConv
from sdflow.runtime.sessions.specialize import specialize
from sdflow.verify.lowering import lower, session_of
from tests.passes.one_pass import edited, run

CHANNELS, OUT = 5, 3
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((OUT, CHANNELS, 3, 3)).astype(np.float32)
BIAS = RNG.standard_normal(OUT).astype(np.float32)


def upsampling(
    factor: float = 2,
    *,
    weight: Any = WEIGHT,
    bias: Any = BIAS,
    mode: str = "nearest",
    between: bool = False,
    **conv: Any,
) -> Any:
    """x -> Resize -> Conv. between: something else reads what Resize gives."""
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    values = {"w": weight, "scales": np.array([1, 1, factor, factor], np.float32)}
    values |= {} if bias is None else {"b": bias.astype(weight.dtype)}
    settings = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["large"], "resize", **settings),
        helper.make_node(
            "Conv", ["large", "w", *(["b"] if bias is not None else [])], ["y"], "conv", **{"pads": [1] * 4, **conv}
        ),
    ]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in ("y", *(["large"] if between else []))]
    x = helper.make_tensor_value_info("x", kind, ["batch", weight.shape[1] * conv.get("group", 1), "rows", "columns"])
    graph = helper.make_graph(
        nodes, "test", [x], outputs, [numpy_helper.from_array(value, name) for name, value in values.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def upsampling_in_nhwc(
    *,
    layout: str = "NHWC",
    weight: Any = WEIGHT,
    bias: Any = BIAS,
    between: bool = False,
    cast: bool = False,
    **conv: Any,
) -> Any:
    """x -> Resize -> Transpose (-> Cast) -> NhwcConv, as the fusions for CUDA leave it; x in NHWC with a Transpose of its own,
    or in NCHW. between: something else reads what Resize gives."""
    model = upsampling(weight=weight, bias=bias, between=between, **conv)
    graph, kind = model.graph, helper.np_dtype_to_tensor_dtype(weight.dtype)
    resize, convolution = graph.node
    convolution.op_type, convolution.domain, convolution.input[0] = "NhwcConv", "com.microsoft", "large_nhwc"
    (kernel,) = (tensor for tensor in graph.initializer if tensor.name == "w")
    kernel.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weight.transpose(0, 2, 3, 1)), "w"))
    graph.node.insert(1, helper.make_node("Transpose", ["large"], ["large_nhwc"], "to_nhwc", perm=[0, 2, 3, 1]))
    if cast:
        graph.node.insert(2, helper.make_node("Cast", ["large_nhwc"], ["cast"], to=kind))
        convolution.input[0] = "cast"
    if layout == "NHWC":
        resize.input[0] = "nchw"
        graph.node.insert(0, helper.make_node("Transpose", ["x"], ["nchw"], "to_nchw", perm=[0, 3, 1, 2]))
        shape = ["batch", "rows", "columns", weight.shape[1]]
        graph.input[0].CopyFrom(helper.make_tensor_value_info("x", kind, shape))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def run_lowered(model: Any, folder: Path, x: Any) -> Any:
    return session_of(lower(model), folder, threads=1).run(None, {"x": x})[0]


@pytest.mark.parametrize("bias", [BIAS, None], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_in_nhwc_it_computes_the_same_with_one_convolution(tmp_path: Path, layout: str, bias: Any) -> None:
    before = upsampling_in_nhwc(layout=layout, bias=bias, cast=bias is None)
    after, facts = edited(SubpixelConv, before, tmp_path)
    assert facts["replaced"] == 1
    assert "Resize" not in facts["operators"] and facts["operators"]["NhwcConv"] == 1
    assert facts["operators"].get("Transpose", 0) == (0 if layout == "NHWC" else 1)
    for images, rows, columns in ((2, 4, 5), (1, 1, 1), (1, 7, 2)):
        image = (rows, columns, CHANNELS) if layout == "NHWC" else (CHANNELS, rows, columns)
        x = RNG.standard_normal((images, *image)).astype(np.float32)
        expected = run_lowered(before, tmp_path, x)
        assert expected.shape == (images, 2 * rows, 2 * columns, OUT)
        np.testing.assert_allclose(run_lowered(after, tmp_path, x), expected, rtol=0, atol=2e-5)


def test_a_session_finds_what_is_put_between_one_another_again(tmp_path: Path) -> None:
    after, _ = edited(SubpixelConv, upsampling_in_nhwc(), tmp_path)

    def found(model: Any) -> list[Interleaving]:
        fixed = specialize(model, {"batch": 2, "rows": 3, "columns": 4})
        items = (*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info)
        shapes = {item.name: [axis.dim_value for axis in item.type.tensor_type.shape.dim] for item in items}
        return list(interleavings(fixed.graph, shapes))

    (one,) = found(after)
    assert (one.value, one.result, len(one.nodes)) == ("conv/phases", "y", 8)
    assert found(upsampling_in_nhwc()) == []
    for name, wrong in (("conv/phase01", "conv/phase10"), ("conv/row0", "conv/row1")):  # two in each other's place
        other = onnx.ModelProto.FromString(after.SerializeToString())
        for node in other.graph.node:
            if node.op_type == "Concat":
                swapped = {name: wrong, wrong: name}
                node.input[:] = [swapped.get(each, each) for each in node.input]
        assert found(other) == []
    seen = onnx.ModelProto.FromString(after.SerializeToString())
    seen.graph.output.append(helper.make_tensor_value_info("conv/row1", onnx.TensorProto.FLOAT, None))
    assert found(seen) == [], "something else reads a part of it"


@pytest.mark.parametrize(
    "model",
    [
        upsampling_in_nhwc(between=True),
        upsampling_in_nhwc(pads=[0] * 4),
        upsampling_in_nhwc(strides=[2, 2]),
        upsampling_in_nhwc(weight=WEIGHT[:, :, :1, :1], pads=[0] * 4),
        upsampling_in_nhwc(weight=WEIGHT.astype(np.float16)),
    ],
    ids=["read twice", "pads", "strides", "1x1", "float16"],
)
def test_anything_else_in_nhwc_is_left_alone(tmp_path: Path, model: Any) -> None:
    with pytest.raises(PassError, match="there is no float32 3x3 Conv or NhwcConv"):
        edited(SubpixelConv, model, tmp_path)


@pytest.mark.parametrize("bias", [BIAS, None], ids=["bias", "no bias"])
def test_it_computes_the_same_in_any_size(tmp_path: Path, bias: Any) -> None:
    before = upsampling(bias=bias)
    after, facts = edited(SubpixelConv, before, tmp_path)
    assert facts["replaced"] == 1
    assert "Resize" not in facts["operators"] and facts["operators"]["Conv"] == 4
    for shape in ((2, CHANNELS, 4, 5), (1, CHANNELS, 1, 1), (1, CHANNELS, 7, 2)):
        x = RNG.standard_normal(shape).astype(np.float32)
        expected = run(before, x)
        assert expected.shape == (shape[0], OUT, 2 * shape[2], 2 * shape[3])
        np.testing.assert_allclose(run(after, x), expected, rtol=0, atol=2e-5)


def test_whole_numbers_come_out_exactly(tmp_path: Path) -> None:
    weight = RNG.integers(-8, 9, WEIGHT.shape).astype(np.float32)
    before = upsampling(weight=weight, bias=np.arange(OUT, dtype=np.float32))
    x = RNG.integers(-8, 9, (1, CHANNELS, 6, 9)).astype(np.float32)
    np.testing.assert_array_equal(run(edited(SubpixelConv, before, tmp_path)[0], x), run(before, x))


@pytest.mark.parametrize(
    "model",
    [
        upsampling(3),
        upsampling(1.5),
        upsampling(mode="linear"),
        upsampling(between=True),
        upsampling(pads=[0] * 4),
        upsampling(strides=[2, 2]),
        upsampling(dilations=[2, 2]),
        upsampling(weight=WEIGHT[:, :1], group=OUT),
        upsampling(weight=WEIGHT[:, :, :1, :1], pads=[0] * 4),
        upsampling(weight=WEIGHT.astype(np.float16)),
    ],
    ids=["three", "fraction", "linear", "read twice", "pads", "strides", "dilations", "group", "1x1", "float16"],
)
def test_anything_else_is_left_alone(tmp_path: Path, model: Any) -> None:
    with pytest.raises(PassError, match="there is no float32 3x3 Conv"):
        edited(SubpixelConv, model, tmp_path)
