"""SubpixelConv computes what upsampling and convolving computes, and leaves every other Resize alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from sdflow.errors import PassError
from sdflow.passes.subpixel_conv import SubpixelConv
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
    with pytest.raises(PassError, match="there is no 3x3 Conv"):
        edited(SubpixelConv, model, tmp_path)
