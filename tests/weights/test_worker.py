"""Structure and bind in processes of their own, as the executor runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdflow.weights.worker import run
from sdflow.workers import run_worker
from tests.weights.conftest import Builder, chain, config_of, synthetic

Content = Callable[[Path], dict[str, bytes]]
WORKER = "sdflow.weights.worker"


def requests(structure: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    submodel = "safety_checker"
    steps = [{"pass": step.implementation.name, "config": dict(step.config)} for step in chain(submodel, "cuda")]
    build = {"do": "structure", "submodel": submodel, "config": config_of(submodel), "chain": steps}
    fill = {"do": "bind", "submodel": submodel, "structure": str(structure), "checkpoint": synthetic(submodel)}
    return {**build, "out": str(structure)}, {**fill, "loras": [], "base": None, "out": str(out)}


def test_both_steps_run_in_workers(built: Builder, tmp_path: Path, content: Content) -> None:
    structure, out = tmp_path / "structure", tmp_path / "out"
    structure.mkdir()
    out.mkdir()
    for request in requests(structure, out):
        result = run_worker(WORKER, request, log=tmp_path / "log", on_phase=lambda _: None, on_memory=lambda _: None)
        assert result.value["facts"]
    assert content(out) == content(built.carried("safety_checker", "cuda"))


def test_a_pass_that_looks_at_a_weight_asks_for_the_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """A fusion that reads a value, as a later release of onnxruntime may have one."""
    import onnx
    from onnxruntime.transformers import optimizer

    del optimizer  # puts its folder onto sys.path
    fusion = __import__("fusion_quickgelu").FusionQuickGelu
    original = fusion.fuse

    def nosy(self: Any, node: Any, *maps: Any) -> None:
        weight = next(tensor for tensor in self.model.model.graph.initializer if len(tensor.dims) == 2)
        if onnx.numpy_helper.to_array(weight).max() > 0:
            original(self, node, *maps)

    monkeypatch.setattr(fusion, "fuse", nosy)
    request, _ = requests(tmp_path, tmp_path)
    result = run(request, lambda _: None)
    assert list(result) == ["carry"]
    assert "looks at the values of" in result["carry"]
    assert "nosy" in result["carry"]
