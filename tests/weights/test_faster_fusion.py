"""The order in which shape inference finds nodes is the one that its own sweeps over the graph give."""

from __future__ import annotations

import random
from typing import Any

import pytest
from onnx import TensorProto, helper

from sdflow.weights.faster_fusion import nodes_in_order, order_of_sweeps


def graph_of(seed: int, count: int = 60) -> Any:
    """Nodes of one to three inputs, not in order; some lead nowhere."""
    chance = random.Random(seed)
    names, nodes = ["x", "w"], []
    for number in range(count):
        inputs = chance.sample(names[-12:], min(chance.randint(1, 3), len(names[-12:])))
        nodes.append(helper.make_node("Sum", inputs, [f"n{number}"], name=f"node{number}"))
        names.append(f"n{number}")
    chance.shuffle(nodes)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", f"n{count - 9}")]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0] * 4)
    return helper.make_graph(nodes, "g", value[:1], value[1:], [weight])


def swept(graph: Any) -> list[str]:
    """As `SymbolicShapeInference._infer_impl` sorts them."""
    known, found = {"x", "w"}, []
    while not all(each.name in known for each in graph.output):
        for node in graph.node:
            if node.output[0] not in known and all(name in known for name in node.input):
                known.update(node.output)
                found.append(node.name)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_sweeps_over_the_graph(seed: int) -> None:
    graph = graph_of(seed)
    order = order_of_sweeps(graph)
    assert order is not None
    assert [graph.node[index].name for index in order] == swept(graph)
    nodes = [graph.node[index] for index in order]
    assert order_of_sweeps(helper.make_graph(nodes, "g", graph.input, graph.output, graph.initializer)) is None


def test_a_circle_and_a_name_that_nothing_makes_are_left_to_onnx_runtime() -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    for inputs in (["b", "x"], ["nowhere"]):
        nodes = [helper.make_node("Sum", inputs, ["a"]), helper.make_node("Sum", ["a"], ["b"])]
        nodes.append(helper.make_node("Sum", ["b"], ["y"]))
        assert order_of_sweeps(helper.make_graph(nodes, "g", value[:1], value[1:])) is None


def test_shape_inference_finds_the_same_shapes() -> None:
    from onnxruntime.transformers import optimizer  # noqa: F401  puts the folder of the fusions onto sys.path

    helper_class = __import__("shape_infer_helper").SymbolicShapeInferenceHelper
    model = helper.make_model(graph_of(3), opset_imports=[helper.make_opsetid("", 17)])

    def shapes() -> dict[str, list[Any]]:
        found = helper_class(model)
        assert found.infer({"batch": 3})
        return {node.output[0]: found.get_edge_shape(node.output[0]) for node in found.out_mp_.graph.node}

    expected = shapes()
    with nodes_in_order():
        have = shapes()
    assert have and have == {name: expected[name] for name in have}
    assert {f"n{60 - 9}"} <= have.keys()
