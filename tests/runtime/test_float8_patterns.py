"""Blocks of transformers in float8: which norms and activations give rows of float8 themselves, and to which products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto
from transformer_graphs import Graph, joint_block, parallel_block, sandwich_block

from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL
from sdflow.passes.base import PassInputs
from sdflow.passes.quantize_fp8 import QuantizeFp8, QuantizeFp8Config
from sdflow.runtime.kernels.float8 import with_float8
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.specialize import specialize

BLOCKS: dict[str, tuple[Callable[[Graph], str], dict[str, int], dict[str, int]]] = {
    "joint": (
        joint_block,
        {"Float8ModulatedNorm": 1, "Float8GatedResidualNorm": 2, "Float8TanhGelu": 1, "Float8Rows": 2, "Float8Product": 11},
        {"MatMul": 1},  # the modulation's, of one row for an image
    ),
    "parallel": (
        parallel_block,
        {"Float8ModulatedNorm": 2, "Float8GatedResidualNorm": 1, "Float8SiluGated": 2, "Float8Rows": 1, "Float8Product": 8,
         "GatedResidual": 2, "ModulatedNorm": 1},  # of the result, which no product reads
        {},
    ),
    "sandwich": (
        sandwich_block,
        {"Float8ModulatedNorm": 1, "Float8GatedResidualNorm": 2, "Float8SiluGated": 1, "Float8Rows": 1, "Float8Product": 8},
        {},
    ),
}  # fmt: skip


def quantized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The graph behind QuantizeFp8, with its shapes."""
    for name in ("before", "after"):
        (folder / name).mkdir()
    onnx.save(model, folder / "before/model.onnx")
    config = QuantizeFp8Config(smallest=16)
    QuantizeFp8().run(PassInputs("transformer", folder / "before", {}), folder / "after", config)
    return specialize(onnx.load(folder / "after/model.onnx"), {})


def ours(model: onnx.ModelProto) -> dict[str, Any]:
    return {node.name: node for node in model.graph.node if node.domain == DOMAIN}


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_products_read_is_quantized_where_it_is_computed(kind: str, element: int, tmp_path: Path) -> None:
    block, wanted, products = BLOCKS[kind]
    g = Graph(element)
    fixed = quantized(g.model(block(g)), tmp_path)
    found = with_own_kernels(with_float8(fixed))
    assert found is not None
    suffix = "Bfloat16" if element == TensorProto.BFLOAT16 else ""
    counts = Counter(node.op_type for node in ours(found).values())
    assert counts == {f"{name}{suffix}": count for name, count in wanted.items()}
    assert Counter(node.op_type for node in found.graph.node if node.op_type == "MatMul") == products
    known = {tensor.name for tensor in found.graph.initializer} | {item.name for item in found.graph.input}
    for node in found.graph.node:
        assert {name for name in node.input if name} <= known, node.name
        known |= set(node.output)


def test_each_product_reads_the_rows_of_what_it_read_before(tmp_path: Path) -> None:
    g = Graph()
    fixed = quantized(g.model(joint_block(g)), tmp_path)
    read = {node.name: node.input[0] for node in fixed.graph.node if node.op_type == FLOAT8_MATMUL}
    found = with_own_kernels(with_float8(fixed))
    plain = with_own_kernels(fixed)
    assert found is not None
    assert plain is not None
    before, after = ours(plain), ours(found)
    for name, source in read.items():
        assert list(after[name].input[:2]) == [f"{source}/float8", f"{source}/float8/scales"]
    fused = [node for name, node in after.items() if name in before and name not in read]
    assert len(fused) == 4
    for node in fused:
        values = list(before[node.name].output)
        kept = values.pop(1) if before[node.name].op_type == "GatedResidualNorm" else None
        rows = [[f"{value}/float8", f"{value}/float8/scales"] for value in values]
        assert list(node.output) == [*rows[0], *([kept] if kept else []), *(name for pair in rows[1:] for name in pair)]
        assert node.input == before[node.name].input
        assert node.attribute == before[node.name].attribute


def test_a_result_that_something_else_reads_stays(tmp_path: Path) -> None:
    g = Graph()
    x = g.input(1, 5, 64)
    normal = g.modulated(g.layer_norm(x), g.input(1, 1, 64), g.input(1, 1, 64))
    fixed = quantized(g.model(g.product(normal, 64, 64, bias=False), normal), tmp_path)
    found = with_own_kernels(with_float8(fixed))
    assert found is not None
    counts = Counter(node.op_type for node in ours(found).values())
    assert counts == {"ModulatedNorm": 1, "Float8Rows": 1, "Float8Product": 1}


@pytest.mark.parametrize("read_twice", [False, True])
def test_some_of_an_images_rows_are_taken_without_a_copy(read_twice: bool, tmp_path: Path) -> None:
    """As of what a joint attention gives, text and image behind one another."""
    g = Graph()
    part = g.part(g.input(2, 9, 64), 3, 9, 1)
    results = [g.product(part, 64, 32, bias=False), *([part] if read_twice else [])]
    made = with_float8(quantized(g.model(*results), tmp_path))
    (rows,) = (node for node in made.graph.node if node.op_type == "Float8Rows")
    given = {item.name: item.i for item in rows.attribute}
    if read_twice:
        assert (list(rows.input), given) == ([part], {"tokens": 0, "first": 0})
    else:
        assert (list(rows.input), given) == (["in0"], {"tokens": 6, "first": 3})
    assert any(node.op_type == "Slice" for node in made.graph.node) is read_twice
