"""The registry: what can be named in a chain, what not and why, and that asking is cheap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.providers.olive_options import installed_options
from sdflow.config.catalog import PassNotFound
from sdflow.passes import olive_pass as olive_pass_module
from sdflow.passes.olive_pass import snapshot_note
from sdflow.passes.registry import catalog, describe, find_pass

HERE = Path(__file__).parent


def test_every_name_is_found_and_described() -> None:
    for name in catalog().names():
        info = catalog().find(name, HERE)
        assert info.name == name
        assert describe(name, HERE).summary, name
    assert {"OnnxConversion", "LoraMerge", "OrtTransformersOptimization", "OnnxPeepholeOptimizer"} <= set(
        catalog().names()
    )


def test_the_first_pass_takes_a_checkpoint_and_the_others_onnx() -> None:
    assert catalog().find("OnnxConversion", HERE).accepts == "checkpoint"
    assert catalog().find("OnnxFloatToFloat16", HERE).accepts == "onnx"
    assert catalog().find("LoraMerge", HERE).takes_loras
    assert not catalog().find("OnnxPeepholeOptimizer", HERE).takes_loras


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OnnxPeepholeOptimiser", "did you mean OnnxPeepholeOptimizer"),
        ("onnxconversion", "did you mean OnnxConversion"),
        ("LoRA", "takes hf models"),
        ("SplitModel", "produces composite"),
        ("OnnxStaticQuantization", "calibration data"),
        ("IncDynamicQuantization", "needs neural-compressor, which is not installed"),
        ("OrtSessionParamsTuning", "session options"),
        ("nowhere/prune.py:Prune", "no such script"),
    ],
)
def test_a_pass_that_cannot_be_used_says_why(name: str, reason: str) -> None:
    with pytest.raises(PassNotFound, match=reason):
        find_pass(name, HERE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_chanel": True}, "per_chanel"),
        ({"per_channel": "yes"}, "per_channel"),
        ({"precision": "int7"}, "precision"),
        ({"save_as_external_data": True}, "stored the same way"),
    ],
)
def test_options_of_olive_passes_are_checked_by_name_and_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        find_pass("OnnxDynamicQuantization", HERE).Config(**options)


def test_options_that_name_files_are_not_offered() -> None:
    assert "data_config" not in find_pass("OnnxQuantization", HERE).Config.model_fields


def test_asking_imports_nothing_heavy(tmp_path: Path, python: Any) -> None:
    code = (
        "import json, pathlib, sys\n"
        "from sdflow.passes.registry import catalog\n"
        "names = catalog().names()\n"
        "for name in names: catalog().find(name, pathlib.Path('.'))\n"
        "heavy = [name for name in ('torch', 'onnx', 'olive', 'onnxruntime', 'numpy') if name in sys.modules]\n"
        "print(json.dumps([len(names), heavy]))"
    )
    asked, heavy = json.loads(python(code, cwd=tmp_path, env={"HOME": str(tmp_path)}))
    assert asked > 20, "sdflow's own passes and Olive's"
    assert heavy == []


def test_the_snapshot_of_olives_options_is_that_of_the_installed_olive() -> None:
    assert olive_pass_module._snapshot() == json.loads(json.dumps(installed_options()))


def test_with_another_olive_the_check_is_left_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot_note() is None
    snapshot = {**olive_pass_module._snapshot(), "version": "0.1.0"}
    monkeypatch.setattr(olive_pass_module, "_snapshot", lambda: snapshot)
    olive_pass_module._make.cache_clear()
    note = snapshot_note()
    assert note is not None and "checked when they run" in note
    assert find_pass("OnnxDynamicQuantization", HERE).Config(new_option=1).model_dump() == {"new_option": 1}
    monkeypatch.undo()
    olive_pass_module._make.cache_clear()
