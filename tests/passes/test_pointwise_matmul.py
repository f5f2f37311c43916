"""PointwiseMatMul gives what the convolutions gave, and leaves every other convolution alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.errors import PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.conv_bias_fusion import ConvBiasFusion, ConvBiasFusionConfig
from sdflow.passes.pointwise_matmul import PointwiseMatMul, PointwiseMatMulConfig
from sdflow.verify.lowering import lower, session_of

RANDOM = np.random.default_rng(0)
ATTRIBUTES = {"kernel_shape": [1, 1], "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0], "group": 1}


def convolution(*, bias: bool = False, kernel: int = 1, **attributes: Any) -> Any:
    """A model of one NhwcConv from 8 to 12 channels."""
    weights = [numpy_helper.from_array(RANDOM.normal(0, 1, (12, kernel, kernel, 8)).astype(np.float32), "w")]
    if bias:
        weights.append(numpy_helper.from_array(np.ones(12, np.float32), "b"))
    given = {**ATTRIBUTES, "kernel_shape": [kernel, kernel], **attributes}
    inputs = ["x", *(tensor.name for tensor in weights)]
    node = helper.make_node("NhwcConv", inputs, ["y"], "conv", domain="com.microsoft", **given)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "height", "width", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "a", "b", 12])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "test", [x], [y], weights), opset_imports=opsets, ir_version=8)


def replace(model: Any, folder: Path) -> tuple[Any, Any]:
    source, out = folder / "source", folder / "out"
    source.mkdir()
    out.mkdir()
    onnx.save(model, str(source / "model.onnx"))
    (source / "config.json").write_text("{}")
    facts = PointwiseMatMul().run(PassInputs("unet", source, {}), out, PointwiseMatMulConfig())
    assert (out / "config.json").read_text() == "{}"
    return onnx.load(str(out / "model.onnx")), facts


def test_a_convolution_of_size_one_is_a_product(tmp_path: Path) -> None:
    before = convolution()
    after, facts = replace(before, tmp_path)
    assert (facts["replaced"], facts["operators"]) == (1, {"MatMul": 1})
    for shape in ((2, 3, 5, 8), (1, 7, 2, 8)):
        feeds = {"x": RANDOM.standard_normal(shape).astype(np.float32)}
        old, new = (session_of(lower(m), tmp_path, threads=1).run(None, feeds)[0] for m in (before, after))
        assert old.shape == (*shape[:3], 12)
        np.testing.assert_allclose(new, old, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        convolution(bias=True),
        convolution(kernel=3),
        convolution(strides=[2, 2]),
        convolution(pads=[1, 1, 1, 1]),
    ],
    ids=["bias", "3x3", "strides", "pads"],
)
def test_any_other_convolution_is_left_alone(tmp_path: Path, model: Any) -> None:
    with pytest.raises(PassError, match="no NhwcConv of size 1 x 1"):
        replace(model, tmp_path)


def test_a_unet_gives_what_it_gave(fused_unet: Any, tiny_unet: Any, tmp_path: Path) -> None:
    fused, out = tmp_path / "fused", tmp_path / "out"
    fused.mkdir()
    out.mkdir()
    ConvBiasFusion().run(PassInputs("unet", fused_unet.path, {}), fused, ConvBiasFusionConfig())
    facts = PointwiseMatMul().run(PassInputs("unet", fused, {}), out, PointwiseMatMulConfig())
    assert facts["replaced"] >= 6
    old, new = (
        session_of(lower(onnx.load(str(path / "model.onnx"), load_external_data=False)), path, threads=1).run(
            None, tiny_unet.feeds
        )[0]
        for path in (fused_unet.path, out)
    )
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())
