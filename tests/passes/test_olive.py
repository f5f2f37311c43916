"""The adapter for olive-ai: what it leaves on disk, and how it fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest

from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.passes.base import PassInputs
from sdflow.passes.olive import SILENCE, run_olive_pass
from sdflow.passes.registry import find_pass


def test_any_olive_pass_runs_by_its_name_and_does_its_work(tiny_linear: Any, tmp_path: Path, run_onnx: Any) -> None:
    found = find_pass("OnnxPeepholeOptimizer", tmp_path)
    facts = found().run(PassInputs("unet", tiny_linear.path, {}), tmp_path, found.Config(onnxoptimizer_optimize=False))
    before = graph_facts(tiny_linear.path / "model.onnx")
    assert facts["nodes"] < before["nodes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]
    assert (run_onnx(tmp_path, tiny_linear.feeds) == run_onnx(tiny_linear.path, tiny_linear.feeds)).all()


def test_dynamic_quantization_shrinks_the_weights_to_8_bits(tiny_linear: Any, tmp_path: Path) -> None:
    found = find_pass("OnnxDynamicQuantization", tmp_path)
    facts = found().run(PassInputs("unet", tiny_linear.path, {}), tmp_path, found.Config(precision="int8"))
    assert facts["dtypes"]["int8"]["bytes"] == 64 * 64 + 1, "the matrix and its zero point"
    assert facts["operators"]["MatMulInteger"] == 1


def test_nothing_appears_in_home_or_the_current_directory(tiny_linear: Any, tmp_path: Path, python: Any) -> None:
    home, here, out = tmp_path / "home", tmp_path / "here", tmp_path / "out"
    for folder in (home, here, out):
        folder.mkdir()
    code = (
        "from pathlib import Path; from sdflow.passes.olive import run_olive_pass\n"
        f"run_olive_pass('OnnxPeepholeOptimizer', {{}}, Path({str(tiny_linear.path)!r}), Path({str(out)!r}))"
    )
    said = python(code, cwd=here, env={**SILENCE, "HOME": str(home), "TMPDIR": str(here)})
    assert (out / "model.onnx").is_file()
    assert list(home.rglob("*")) == []
    assert list(here.rglob("*")) == []
    assert said == "", "standard output belongs to sdflow's results"


@pytest.mark.parametrize("missing", sorted(SILENCE))
def test_olive_is_not_imported_unless_telemetry_is_off(missing: str, tmp_path: Path, python: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from sdflow.errors import PassError\n"
        "from sdflow.passes.olive import run_olive_pass\n"
        "try: run_olive_pass('OnnxPeepholeOptimizer', {}, Path('nowhere'), Path('out'))\n"
        "except PassError as error: print(error, any(name.split('.')[0] == 'olive' for name in sys.modules))"
    )
    env = {key: value for key, value in SILENCE.items() if key != missing}
    said = python(code, cwd=tmp_path, env={**env, "HOME": str(tmp_path)})
    assert missing in said
    assert said.strip().endswith("False")


def test_a_pass_that_raises_is_a_pass_error_with_its_cause(tiny_linear: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="OnnxIODataTypeConverter") as caught:
        run_olive_pass("OnnxIODataTypeConverter", {"source_dtype": 1, "target_dtype": 999}, tiny_linear.path, tmp_path)
    assert caught.value.__cause__ is not None
    assert list(tmp_path.iterdir()) == []


def test_a_pass_that_hands_its_input_back_is_an_error(tiny_linear: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="returned its input unchanged"):
        run_olive_pass("OrtTransformersOptimization", {"model_type": "no_such_type"}, tiny_linear.path, tmp_path)


def test_an_option_that_the_pass_does_not_have_is_an_error(tiny_linear: Any, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="unknown option per_chanel"):
        run_olive_pass("OnnxDynamicQuantization", {"per_chanel": True}, tiny_linear.path, tmp_path)


def test_the_process_is_as_before_after_a_pass(tiny_linear: Any, tmp_path: Path) -> None:
    before = (Path.cwd(), dict(os.environ))
    run_olive_pass("OnnxPeepholeOptimizer", {}, tiny_linear.path, tmp_path)
    assert (Path.cwd(), dict(os.environ)) == before


def test_metadata_that_changes_nothing_is_not_in_the_result(tiny_linear: Any, tmp_path: Path) -> None:
    run_olive_pass("OnnxPeepholeOptimizer", {}, tiny_linear.path, tmp_path)
    model = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False)
    assert not model.producer_name and not model.producer_version and not model.metadata_props
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
