"""Integer ArgMax becomes one that CUDA has a kernel for, with the same result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.runtime.sessions.bound import Bound
from sdflow.runtime.sessions.cuda_argmax import with_float_argmax
from sdflow.runtime.sessions.place import Place, place
from sdflow.runtime.sessions.placement import placement
from sdflow.runtime.sessions.session import PLAIN, create_session
from sdflow.targets import TARGETS

TOKENS, WORDS, WIDTH = 77, 49_408, 64


def model(element: int, cast_to: int | None) -> Any:
    """The end of a text, as transformers 5 computes it: the place of the largest id."""
    nodes = [helper.make_node("ArgMax", ["ids"], ["end"], axis=-1, keepdims=0)]
    if cast_to is not None:
        nodes = [helper.make_node("Cast", ["ids"], ["cast"], to=cast_to), *nodes]
        nodes[-1].input[0] = "cast"
    given = helper.make_tensor_value_info("ids", element, ["batch", TOKENS])
    found = helper.make_tensor_value_info("end", TensorProto.INT64, ["batch"])
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(helper.make_graph(nodes, "g", [given], [found]), opset_imports=opset, ir_version=8)


@pytest.mark.parametrize("cast_to", [None, TensorProto.INT32])
@pytest.mark.parametrize("element", [TensorProto.INT32, TensorProto.INT64])
def test_ids_are_compared_exactly_as_float32(element: int, cast_to: int | None) -> None:
    made = model(element, cast_to)
    assert with_float_argmax(made)
    onnx.checker.check_model(made, full_check=True)
    (argmax,) = (node for node in made.graph.node if node.op_type == "ArgMax")
    (before,) = (node for node in made.graph.node if node.output[0] == argmax.input[0])
    assert (before.op_type, before.attribute[0].i) == ("Cast", TensorProto.FLOAT)
    # Adjacent ids at the end of CLIP's and the largest vocabularies, ties included: the first one counts.
    ids = np.random.default_rng(0).integers(0, 262_000, (64, TOKENS)).astype(helper.tensor_dtype_to_np_dtype(element))
    ids[:32, 20], ids[:32, 40:] = 262_142, 262_143
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"ids": ids})[0], ids.argmax(-1))


def test_float_argmax_stays() -> None:
    made = model(TensorProto.FLOAT, None)
    before = made.SerializeToString(deterministic=True)
    assert not with_float_argmax(made)
    assert made.SerializeToString(deterministic=True) == before


def pooling(computed: bool) -> tuple[Any, np.ndarray]:
    """A text encoder's pooled output: each text's embedding at its largest id. computed: the ids that are compared are the
    result of a product, whose type nobody knows. The model, and its embeddings."""
    table = np.random.default_rng(1).standard_normal((WORDS, WIDTH), np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["hidden"]),
        helper.make_node("Mul", ["ids", "one"], ["same"]),
        helper.make_node("ArgMax", ["same" if computed else "ids"], ["end"], "end", axis=-1, keepdims=1),
        helper.make_node("GatherND", ["hidden", "end"], ["pooled"], batch_dims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "pooling",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, [2, TOKENS])],
        [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, [2, WIDTH])],
        [onnx.numpy_helper.from_array(table, "table"), onnx.numpy_helper.from_array(np.int32([1]), "one")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), table


def pooled(session: Any, where: Place, delay: Any, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Of each text in turn. delay: called before its ids are there; on CUDA, what it queues runs while ids are copied."""
    import torch

    bound = Bound(session, where, {"ids": torch.zeros(2, TOKENS, dtype=torch.int32, device=where.device)})
    found = []
    for ids in texts:
        with where.current():
            delay()
            bound.inputs["ids"].copy_(where.placed(torch.from_numpy(ids)), non_blocking=True)
            found.append(bound.run()["pooled"].clone())
    return [each.cpu().numpy() for each in found]


@pytest.mark.parametrize("computed", [False, True], ids=["of the graph's ids", "of computed ids"])
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_end_of_a_text_is_right_though_runs_are_queued(target: str, computed: bool, tmp_path: Path) -> None:
    import torch

    made, table = pooling(computed)
    onnx.save(made, tmp_path / "model.onnx")
    where = place(target)
    stream = None if where.stream is None else where.stream.cuda_stream
    options = replace(PLAIN, stream=stream)
    session = create_session(tmp_path / "model.onnx", TARGETS[target], options)
    if target == "cuda":
        fallen = placement(session, tmp_path / "model.onnx").fallen
        assert ("end" in [node.name for node in fallen]) is computed, "what nobody knows the type of stays on the CPU"
    matrix = torch.ones(4096, 4096, device=target) if target == "cuda" else torch.ones(1)

    def delay() -> None:
        for _ in range(20 if target == "cuda" else 0):
            torch.mm(matrix, matrix)

    random = np.random.default_rng(2)
    texts = [random.permutation(WORDS)[: 2 * TOKENS].astype(np.int32).reshape(2, TOKENS) for _ in range(20)]
    for ids, found in zip(texts, pooled(session, where, delay, texts), strict=True):
        assert np.array_equal(found, table[ids.max(-1)])
