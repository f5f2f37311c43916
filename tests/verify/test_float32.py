"""A float32 graph is held to what float32 needs: an approximation that float16 would hide is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from converted import Converted
from onnx import TensorProto, helper

from sdflow.sources import Checkpoint
from sdflow.tolerances import FLOAT32_LIMIT
from sdflow.verify.reference.cases import Cases
from tests.verify.sample_artifacts import Graph, reference, shown, verdict


def gelu_by_tanh(graph: Graph) -> None:
    """Gelu's erf(x / sqrt(2)) as tanh(sqrt(2 / pi) * (x + 0.044715 x^3)), in every block."""
    factors = {"linear": 2 / 3.141592653589793**0.5, "cubic": 2 * 0.044715 * 2 / 3.141592653589793**0.5}
    for name, value in factors.items():
        graph.proto.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
    nodes = graph.nodes("Erf")
    assert len(nodes) == 16
    for index, node in enumerate(nodes):
        (given,), at = node.input, f"tanh_{index}"
        more = [
            helper.make_node("Mul", [given, given], [f"{at}/square"]),
            helper.make_node("Mul", [f"{at}/square", "cubic"], [f"{at}/scaled"]),
            helper.make_node("Add", [f"{at}/scaled", "linear"], [f"{at}/factor"]),
            helper.make_node("Mul", [given, f"{at}/factor"], [f"{at}/inside"]),
        ]
        place = next(i for i, each in enumerate(graph.proto.graph.node) if each is node or each.name == node.name)
        node.op_type, node.input[0] = "Tanh", f"{at}/inside"
        for each in reversed(more):
            graph.proto.graph.node.insert(place, each)


def epsilon(graph: Graph) -> None:
    for node in graph.nodes("LayerNormalization"):
        graph.attribute(node, "epsilon", 1e-4)


def one_bias(graph: Graph) -> None:
    graph.change("mid_block.resnets.0.conv1.bias", lambda bias: bias * 1.01)


@pytest.fixture(scope="module")
def cases(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cases]:
    return reference(tmp_path_factory.mktemp("reference"), tiny_checkpoint, ["unet"])


def in_place(unet: Path, folder: Path, plant: Callable[[Graph], None]) -> Path:
    """A copy of the UNet, its weights inside, with a fault in it."""
    graph = Graph(onnx.load(str(unet / "model.onnx")))
    plant(graph)
    folder.mkdir()
    onnx.save(graph.proto, str(folder / "model.onnx"))
    (folder / "config.json").write_bytes((unet / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("plant", [gelu_by_tanh, epsilon, one_bias])
def test_what_float16_would_hide_is_found_in_a_float32_graph(
    plant: Callable[[Graph], None],
    tiny_checkpoint: Checkpoint,
    converted: Converted,
    cases: dict[str, Cases],
    tmp_path: Path,
) -> None:
    unet = converted(tiny_checkpoint, ["unet"])["unet"].path
    good = verdict("unet", unet, "cpu", cases)
    assert good.passed and good.outputs[0].distance < FLOAT32_LIMIT / 3, shown(good)
    wrong = verdict("unet", in_place(unet, tmp_path / "unet", plant), "cpu", cases)
    (output,) = wrong.outputs
    assert output.limit is not None and output.distance > output.limit and wrong.problems, shown(wrong)
