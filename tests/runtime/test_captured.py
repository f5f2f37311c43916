"""On a GPU, a run is replayed from a graph of sdflow's own, in which memsets are kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.distance import relative_l2


def attention(folder: Path) -> Path:
    """Before cuDNN's attention ONNX Runtime's CUDA provider queues a memset."""
    shape = (2, 1024, 640)
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=10)
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name in "qkv"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.gpu
def test_what_is_replayed_is_what_a_run_gives_and_has_no_memset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sdflow.runtime import captured
    from sdflow.runtime.bound import Bound
    from sdflow.runtime.place import place
    from sdflow.runtime.sessions import LoadOptions, create_session
    from sdflow.targets import TARGETS

    counts: Counter[str] = Counter()
    change = captured._memsets_as_kernels

    def counting(library: object, graph: int) -> str | None:
        before = kinds(graph)
        why = change(library, graph)
        after = kinds(graph)
        counts.update(memsets_before=before[2], memsets_after=after[2], kernels=after[0] - before[0])
        return why

    monkeypatch.setattr(captured, "_memsets_as_kernels", counting)
    on = place("cuda")
    session = create_session(
        attention(tmp_path), TARGETS["cuda"], LoadOptions(stream=on.stream.cuda_stream), capture=True
    )
    random = np.random.default_rng(0)
    with on.current():
        given = {name: torch.zeros(2, 1024, 640, dtype=torch.float16, device="cuda") for name in "qkv"}
        bound = Bound(session, on, given)
        for _ in range(3):
            values = {name: random.normal(size=(2, 1024, 640)).astype(np.float16) for name in "qkv"}
            for name, value in values.items():
                given[name].copy_(torch.from_numpy(value))
            found = bound.run()["y"].cpu().numpy()
            q, k, v = (torch.from_numpy(values[name]).double().view(2, 1024, 10, 64).transpose(1, 2) for name in "qkv")
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 1024, 640)
            assert relative_l2(found, expected.numpy()) < 2e-3
    assert bound._graph is not None
    assert counts["memsets_before"] > 0, "this test is to have one"
    assert counts["memsets_after"] == 0
    assert counts["kernels"] == counts["memsets_before"]


def kinds(graph: int) -> Counter[int]:
    """Type -> how many nodes of a CUDA graph have it: 0 are kernels, 2 memsets."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    assert not driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    assert not driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    found: Counter[int] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert not driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        found[kind.value] += 1
    return found
