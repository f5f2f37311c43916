"""NhwcResize gives the same bits without a Transpose beside it, and leaves every other Resize alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.errors import PassError
from sdflow.passes.nhwc_resize import NhwcResize
from tests.passes.one_pass import edited, run

NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def upsampling(scales: tuple[float, ...], *, layout: str = "NHWC", cast: bool = False, **settings: str) -> Any:
    """x -> Resize -> Transpose to NHWC; x in NHWC with a Transpose of its own, or in NCHW."""
    kind = TensorProto.FLOAT16 if cast else TensorProto.FLOAT
    values = numpy_helper.from_array(np.array(scales, np.float16 if cast else np.float32))
    nodes = [helper.make_node("Constant", [], ["constant"], value=values)]
    if cast:
        nodes.append(helper.make_node("Cast", ["constant"], ["scales"], to=TensorProto.FLOAT))
    if layout == "NHWC":
        nodes.append(helper.make_node("Transpose", ["x"], ["nchw"], perm=[0, 3, 1, 2]))
    source, used = "nchw" if layout == "NHWC" else "x", "scales" if cast else "constant"
    nodes.append(helper.make_node("Resize", [source, "", used], ["large"], "resize", **{**NEAREST, **settings}))
    nodes.append(helper.make_node("Transpose", ["large"], ["y"], perm=[0, 2, 3, 1]))
    x = helper.make_tensor_value_info("x", kind, ["batch", "a", "b", "c"])
    y = helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph(nodes, "test", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("factor", [2, 3])
def test_upsampling_by_a_whole_factor_gives_the_same_bits(tmp_path: Path, layout: str, factor: int, cast: bool) -> None:
    before = upsampling((1, 1, factor, factor), layout=layout, cast=cast)
    after, facts = edited(NhwcResize, before, tmp_path)
    assert facts["replaced"] == 1
    assert "Resize" not in facts["operators"]
    assert facts["operators"].get("Transpose", 0) == (0 if layout == "NHWC" else 1)
    for shape in ((2, 3, 4, 5), (1, 1, 7, 2)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float16 if cast else np.float32)
        expected = run(before, x)
        assert expected.shape != x.shape
        np.testing.assert_array_equal(run(after, x), expected)


@pytest.mark.parametrize(
    "model",
    [
        upsampling((1, 1, 1.5, 1.5)),
        upsampling((1, 1, 2, 3)),
        upsampling((1, 2, 2, 2)),
        upsampling((1, 1, 0.5, 0.5)),
        upsampling((1, 1, 2, 2), mode="linear"),
        upsampling((1, 1, 2, 2), nearest_mode="ceil"),
        upsampling((1, 1, 2, 2), coordinate_transformation_mode="half_pixel"),
    ],
    ids=["fraction", "two factors", "channels", "smaller", "linear", "ceil", "half_pixel"],
)
def test_any_other_resize_is_left_alone(tmp_path: Path, model: Any) -> None:
    with pytest.raises(PassError, match="there is no nearest-neighbour Resize"):
        edited(NhwcResize, model, tmp_path)


def test_a_resize_that_others_read_too_is_left_alone(tmp_path: Path) -> None:
    model = upsampling((1, 1, 2, 2))
    model.graph.output.append(helper.make_tensor_value_info("large", TensorProto.FLOAT, None))
    with pytest.raises(PassError, match="there is no nearest-neighbour Resize"):
        edited(NhwcResize, model, tmp_path)
