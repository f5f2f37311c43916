"""Weights are compared with the checkpoint where they are computed for the exact run: each is read once, and what is wrong with
one is found as if all were compared first."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sdflow.verify.artifact import stored
from sdflow.verify.artifact.exact import DAMAGED
from sdflow.weights.tensors import Tensors, open_tensors
from tests.verify.quantized_chain import FUSED, Built, build

MOST = 100_000
"""Bytes of weights in memory at a time: of a transformer's several pieces."""
HALF: Mapping[str, Mapping[str, Any]] = {"OnnxFloatToFloat16": {}}
KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "float16": HALF,
    "int8": {**HALF, "QuantizeInt8": {"activations": "row"}},
    "int4": {**HALF, "QuantizeInt4": {"smallest": 64, "block_size": 16, "algorithm": "rtn"}},
}
"""What is stored -> the passes behind the fused graph."""


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp(request.param), "cuda", KINDS[request.param], begin=FUSED)


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.bound(built.folder / "bound")


def names_of(folder: Path) -> list[str]:
    return [tensor.name for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer]


def changed(artifact: Path, out: Path, *names: str) -> Path:
    """The artifact with one bit of each of these tensors flipped."""
    shutil.copytree(artifact, out)
    model = onnx.load(out / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in names:
            values = numpy_helper.to_array(tensor).copy()
            values.view(np.uint8).reshape(-1)[-values.itemsize] ^= 1
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, out / "model.onnx")
    return out


def test_each_parameter_is_read_once(built: Built, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()

    @contextmanager
    def counting(*args: Any) -> Iterator[Tensors]:
        with open_tensors(*args) as tensors:

            def read(key: str) -> Any:
                reads[key] += 1
                return tensors.read(key)

            yield replace(tensors, read=read)

    monkeypatch.setattr(stored, "open_tensors", counting)
    proof = built.proof(artifact, most=MOST)
    assert (proof.findings, proof.problems, proof.missing) == ([], (), "") and proof.outputs
    assert proof.weights > 0 and reads
    assert {key: count for key, count in reads.items() if count > 1} == {}


def test_a_changed_tensor_is_named_whether_the_exact_run_reads_it_or_not(
    built: Built, artifact: Path, tmp_path: Path
) -> None:
    names = names_of(artifact)
    quantized = [name for name in names if name.endswith(("/int8", "/int4", "/scales", "/zeros"))]
    matrices = [name for name in names if name.endswith("fc1.weight")]
    chosen = dict.fromkeys([*quantized[:3], *quantized[-3:], *matrices, names[0], names[-1]])
    wrong = changed(artifact, tmp_path / "changed", *chosen)
    whole, pieces = (built.proof(wrong, most=most) for most in (None, MOST))
    found = [(each.node, each.what) for each in pieces.findings]
    assert sorted(found) == sorted((each.node, each.what) for each in whole.findings)
    assert {node for node, _ in found} == {*chosen}
    assert (pieces.weights, pieces.missing) == (whole.weights, whole.missing)
    assert [(each.name, each.passed) for each in pieces.outputs] == [(each.name, each.passed) for each in whole.outputs]


def test_a_weight_that_cannot_be_computed_is_named(
    built: Built, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def damaged(*args: Any) -> Iterator[Tensors]:
        with open_tensors(*args) as tensors:

            def read(key: str) -> Any:
                if "layers.1.mlp.fc2.weight" in key:
                    raise OSError("the disk failed")
                return tensors.read(key)

            yield replace(tensors, read=read)

    monkeypatch.setattr(stored, "open_tensors", damaged)
    for most in (None, MOST):
        proof = built.proof(artifact, most=most)
        (finding,) = proof.findings
        assert finding.what == "cannot be computed again: the disk failed"
        assert "fc2" in finding.node or "MatMul" in finding.node
        assert (proof.missing, proof.outputs) == (DAMAGED, ())
