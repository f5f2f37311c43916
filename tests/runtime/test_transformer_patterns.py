"""What of a transformer's graph our operators take over, and that the graph still computes the same.

Blocks as they are built for CUDA, of three architectures (transformer_graphs.py). ONNX Runtime computes both graphs on the CPU,
the one with what our operators stand for written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from transformer_graphs import (
    IMAGES,
    MICROSOFT,
    TOKENS,
    C,
    Graph,
    expanded,
    joint_block,
    parallel_block,
    sandwich_block,
)

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.replace import DOMAIN, with_own_kernels

BLOCKS: dict[str, tuple[Callable[[Graph], str], dict[str, int], dict[str, int]]] = {
    "joint": (
        joint_block,
        {"ModulatedNorm": 1, "GatedResidualNorm": 2, "TanhGelu": 1},
        {"Add": 12, "MatMul": 12},  # of the modulation's product, in the two attentions, of the last one
    ),
    "parallel": (
        parallel_block,
        {"ModulatedNorm": 3, "GatedResidualNorm": 1, "GatedResidual": 2, "SiluGated": 2},
        {"Add": 4, "MatMul": 8, "Slice": 4, "Concat": 1},
    ),
    "sandwich": (
        sandwich_block,
        {"ModulatedNorm": 1, "GatedResidualNorm": 2, "SiluGated": 1},
        {"Add": 3, "MatMul": 8},
    ),
}


def replaced(model: onnx.ModelProto) -> onnx.ModelProto:
    found = with_own_kernels(model)
    assert found is not None
    return found


def counts(model: onnx.ModelProto, domain: str) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == domain)


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_lies_between_products_becomes_ours(kind: str, element: int) -> None:
    block, ours, theirs = BLOCKS[kind]
    g = Graph(element)
    model = g.model(block(g))
    before = model.SerializeToString()
    found = replaced(model)
    suffix = "Bfloat16" if element == TensorProto.BFLOAT16 else ""
    assert counts(found, DOMAIN) == {f"{name}{suffix}": count for name, count in ours.items()}
    assert counts(found, "") == theirs
    assert counts(found, MICROSOFT) == {}
    assert model.SerializeToString() == before, "the artifact's graph was changed"
    read = {name for node in found.graph.node for name in node.input}
    assert {tensor.name for tensor in found.graph.initializer} <= read


def computed(model: onnx.ModelProto) -> list[np.ndarray]:
    import onnxruntime

    random = np.random.default_rng(1)
    feeds = {
        item.name: random.normal(size=[axis.dim_value for axis in item.type.tensor_type.shape.dim]).astype(np.float16)
        for item in model.graph.input
    }
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_graph_computes_the_same(kind: str) -> None:
    g = Graph()
    model = g.model(BLOCKS[kind][0](g))
    (wanted,), (found,) = computed(model), computed(expanded(replaced(model)))
    assert found.shape == wanted.shape
    assert relative_l2(found, wanted) < 3e-3


def inputs(g: Graph) -> tuple[str, str, str]:
    """x, a branch and a row for each image."""
    return g.input(IMAGES, TOKENS, C), g.input(IMAGES, TOKENS, C), g.input(IMAGES, 1, C)


def by_token(g: Graph) -> list[str]:
    x, branch, _ = inputs(g)
    return [g.gated_sum(x, g.input(IMAGES, TOKENS, C), branch)]


def by_row_of_one_image(g: Graph) -> list[str]:
    x, branch, _ = inputs(g)
    return [g.gated_sum(x, g.input(TOKENS, C), branch)]


def of_what_is_a_result(g: Graph) -> list[str]:
    x, branch, row = inputs(g)
    return [g.gated_sum(x, row, branch), g.nodes[-2].output[0]]


def plain(g: Graph) -> list[str]:
    x, branch, _ = inputs(g)
    return [g.rms_norm(g("Add", x, branch))]


def silu_of_what_others_read(g: Graph) -> list[str]:
    x, branch, _ = inputs(g)
    a = g.product(x, C, C)
    return [g.gated(a, branch), g("Add", a, branch)]


def gelu_alone(g: Graph) -> list[str]:
    return [g("FastGelu", g.input(IMAGES, TOKENS, C), domain=MICROSOFT)]


@pytest.mark.parametrize(
    "block", [by_token, by_row_of_one_image, of_what_is_a_result, plain, silu_of_what_others_read, gelu_alone]
)
def test_what_is_something_else_stays(block: Callable[[Graph], list[str]]) -> None:
    g = Graph()
    assert with_own_kernels(g.model(*block(g))) is None


def test_other_types_and_widths_stay() -> None:
    g = Graph(TensorProto.FLOAT)
    assert with_own_kernels(g.model(joint_block(g))) is None
    g = Graph()
    x, branch, row = g.input(1, 3, 60), g.input(1, 3, 60), g.input(1, 1, 60)
    assert with_own_kernels(g.model(g.gated_sum(x, row, branch))) is None


def test_a_scale_that_is_made_of_the_sum_comes_behind_it() -> None:
    g = Graph()
    x, branch, row = inputs(g)
    total = g.gated_sum(x, row, branch)
    scale = g("ReduceMean", total, axes=[1])
    model = g.model(g("Add", g.modulated(g.layer_norm(total), scale, row), total))
    found = replaced(model)
    assert counts(found, DOMAIN) == {"GatedResidual": 1, "ModulatedNorm": 1}
    assert counts(found, "")["LayerNormalization"] == 1
    assert relative_l2(computed(expanded(found))[0], computed(model)[0]) < 3e-3


def test_a_sum_that_two_norms_read_is_computed_once() -> None:
    g = Graph()
    x, branch, row = inputs(g)
    total = g.gated_sum(x, row, branch)
    model = g.model(g("Concat", g("Mul", g.layer_norm(total), row), g("Mul", g.rms_norm(total), row), axis=1))
    found = replaced(model)
    assert counts(found, DOMAIN) == {"GatedResidualNorm": 1, "ModulatedNorm": 1}
    assert relative_l2(computed(expanded(found))[0], computed(model)[0]) < 3e-3
