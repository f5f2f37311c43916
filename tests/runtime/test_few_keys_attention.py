"""Which attentions our kernels take over."""

from __future__ import annotations

import math
import re
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.runtime.kernels.parts import FOLDER
from sdflow.runtime.kernels.replace import DOMAIN, FEW_KEYS, HEAD_SIZES, with_own_kernels

HALF = TensorProto.FLOAT16


def attention(inputs: dict[str, list[int]], element: int = HALF, outputs: str = "y", **attributes: Any) -> Any:
    """One MultiHeadAttention of these inputs and shapes; an input named `none` and a number is left out."""
    names = ["" if name.startswith("none") else name for name in inputs]
    given = {"num_heads": 8, **attributes}
    node = helper.make_node("MultiHeadAttention", names, outputs.split(), "attention", domain="com.microsoft", **given)
    values = [helper.make_tensor_value_info(name, element, shape) for name, shape in inputs.items() if name in names]
    results = [helper.make_tensor_value_info(name, element, None) for name in outputs.split()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "test", values, results), opset_imports=opsets, ir_version=8)


def text(queries: int = 1024, keys: int = 77, size: int = 64, images: int = 2) -> dict[str, list[int]]:
    row = [images, keys, 8 * size]
    return {"q": [images, queries, 8 * size], "k": row, "v": row}


@pytest.mark.parametrize(
    "inputs",
    [
        *(text(size=size) for size in HEAD_SIZES),
        text(keys=1),
        text(keys=FEW_KEYS),
        text(queries=1, images=16),
        {"q": [2, 1024, 512], "kv": [2, 77, 8, 2, 64]},
        {"qkv": [2, 64, 8, 3, 160]},
    ],
    ids=str,
)
def test_attention_to_few_keys_becomes_ours(inputs: dict[str, list[int]]) -> None:
    before = attention(inputs)
    replaced = with_own_kernels(before)
    assert replaced is not None
    (node,) = replaced.graph.node
    assert (node.domain, node.op_type, node.name) == (DOMAIN, "FewKeysAttention", "attention")
    assert (list(node.input), list(node.output)) == (list(inputs), ["y"])
    assert {entry.domain for entry in replaced.opset_import} == {"", "com.microsoft", DOMAIN}
    assert before.SerializeToString() == attention(inputs).SerializeToString(), "the artifact's graph was changed"


def test_there_are_kernels_for_the_sizes_of_heads_that_are_taken_over_and_for_any_number_of_keys() -> None:
    table = (FOLDER / "few_keys_attention.h").read_text(encoding="utf-8")
    assert tuple(map(int, re.findall(r"KERNEL\((\d+), \d+, more,", table))) == HEAD_SIZES


def test_its_scale_is_written_out_and_what_it_does_not_read_is_left_out() -> None:
    def read(**attributes: Any) -> dict[str, Any]:
        inputs = {**text(size=160), "none3": [], "none4": [], "none5": []}
        replaced = with_own_kernels(attention(inputs, outputs="y", mask_filter_value=-1e4, **attributes))
        assert replaced is not None
        assert list(replaced.graph.node[0].input) == ["q", "k", "v"]
        return {item.name: helper.get_attribute_value(item) for item in replaced.graph.node[0].attribute}

    assert read() == {"num_heads": 8, "scale": pytest.approx(1 / math.sqrt(160))}
    assert read(scale=0.0) == {"num_heads": 8, "scale": pytest.approx(1 / math.sqrt(160))}
    assert read(scale=0.5, unidirectional=0) == {"num_heads": 8, "scale": 0.5}


@pytest.mark.parametrize(
    ("inputs", "others"),
    [
        (text(keys=FEW_KEYS + 1), {}),
        (text(size=48), {}),
        (text(), {"element": TensorProto.FLOAT}),
        (text(), {"num_heads": 7}),
        (text(), {"unidirectional": 1}),
        (text(), {"scale": -0.125}),
        (text(), {"outputs": "y present_key present_value"}),
        ({**text(), "bias": [1536]}, {}),
        ({**text(), "none3": [], "mask": [2, 77]}, {}),
        ({**text(), "none3": [], "none4": [], "attention_bias": [2, 8, 1024, 77]}, {}),
        ({**text(), "k": [1, 77, 512], "v": [1, 77, 512]}, {}),  # one text for both images
        ({**text(), "v": [2, 77, 640]}, {}),  # wider values
        ({**text(), "k": [2, 8, 77, 64], "v": [2, 8, 77, 64]}, {}),
        ({"q": [2, 1024, 512], "kv": [2, 77, 8, 3, 64]}, {}),
        ({"qkv": [2, 77, 7, 3, 64]}, {}),
        ({"qkv": [2, 1024, 8, 3, 64]}, {}),
        ({**text(), "q": [2, 0, 512]}, {}),
        ({**text(), "k": [2, 0, 512], "v": [2, 0, 512]}, {}),
    ],
    ids=str,
)
def test_other_attention_stays_with_onnxruntime(inputs: dict[str, list[int]], others: dict[str, Any]) -> None:
    assert with_own_kernels(attention(inputs, **others)) is None


def test_attention_of_unknown_shape_stays_with_onnxruntime() -> None:
    model: onnx.ModelProto = attention(text())
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "sequence"
    assert with_own_kernels(model) is None
