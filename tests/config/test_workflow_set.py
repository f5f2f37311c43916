"""`--set key=value`: typed as YAML, after everything that files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.config import load_workflow
from sdflow.config.override import parse_overrides
from sdflow.config.problems import Problems
from sdflow.config.tree import to_data
from sdflow.config.workflow import PipelineSpec

from .workflow_catalog import SmallCatalog

BASE = """
model: synthetic:sd15
target: cpu
submodels:
  text_encoder: {passes: [{pass: OnnxConversion}]}
  unet:
    passes:
      - {pass: OnnxConversion}
      - {pass: LoraMerge}
      - {pass: OrtTransformersOptimization, model_type: unet, opt_level: 0}
  vae_decoder: {passes: [{pass: OnnxConversion}, {pass: 'own/a.b.py:P'}]}
targets:
  cpu: {passes: {OrtTransformersOptimization: {opt_level: 1}}, evaluate: {image: {steps: 3}}}
evaluate: {latency: null}
"""


def load(folder: Path, *overrides: str, text: str = BASE) -> PipelineSpec:
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "a.b.py").touch()
    (folder / "w.yaml").write_text(text)
    (pipeline,) = load_workflow(folder / "w.yaml", catalog=SmallCatalog(), overrides=overrides).pipelines
    return pipeline


def test_a_step_is_named_by_its_index_in_the_chain_or_by_its_pass(tmp_path: Path) -> None:
    for key in ("unet.passes.2", "submodels.unet.passes.2", "unet.passes.OrtTransformersOptimization"):
        pipeline = load(tmp_path, f"{key}.opt_level=99")
        # The index counts LoraMerge, which a workflow without LoRAs then leaves out.
        assert pipeline.submodels["unet"][1].options["opt_level"] == 99, key
    assert load(tmp_path, "vae_decoder.passes.own/a.b.py:P.strength=2").submodels["vae_decoder"][1].options == {
        "strength": 2
    }


def test_a_component_is_relative_to_its_file_is_set_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/vae.safetensors").touch()
    (tmp_path / "base/base.yaml").write_text("components: {vae: vae.safetensors}")
    text = "extends: base/base.yaml" + BASE
    assert load(tmp_path, text=text).components == {"vae": str(tmp_path / "base/vae.safetensors")}
    assert load(tmp_path, "components.vae=hf:a/b", text=text).components == {"vae": "hf:a/b"}
    assert load(tmp_path, "components={vae: synthetic:sd15}", text=text).components == {"vae": "synthetic:sd15"}
    assert load(tmp_path, "components.vae=hf:a/b").components == {"vae": "hf:a/b"}
    for override in ("components.vae=null", "components=null"):
        assert load(tmp_path, override, text=text).components == {}


def test_a_set_wins_over_the_targets_changes(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "unet.passes.2.opt_level=0", "evaluate.image.steps=7", "evaluate.latency.runs=3")
    assert pipeline.submodels["unet"][1].options["opt_level"] == 0
    assert pipeline.evaluate.image and pipeline.evaluate.image.steps == 7
    assert pipeline.evaluate.latency and pipeline.evaluate.latency.runs == 3


def test_later_sets_win_over_earlier_ones(tmp_path: Path) -> None:
    assert load(tmp_path, "name=a", "name=b").name == "b"


def test_a_null_set_on_a_step_or_a_submodel_removes_it(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "unet.passes.OrtTransformersOptimization=null", "text_encoder=null", "evaluate=null")
    assert [step.pass_name for step in pipeline.submodels["unet"]] == ["OnnxConversion"]
    assert list(pipeline.submodels) == ["unet", "vae_decoder"]


def test_flow_style_sets_maps_and_lists(tmp_path: Path) -> None:
    pipeline = load(
        tmp_path,
        "unet.passes.2.optimization_options={enable_nhwc_conv: false}",
        "unet.passes.2.expect={BiasAdd: 3}",
        "loras=[{file: hf:a/b, scale: 2}]",
        "loras.0.scale=0.5",
    )
    assert pipeline.submodels["unet"][2].options["optimization_options"] == {"enable_nhwc_conv": False}
    assert pipeline.submodels["unet"][2].expect == {"BiasAdd": 3}
    assert (pipeline.loras[0].reference, pipeline.loras[0].scale) == ("hf:a/b", 0.5)


def test_passes_can_be_changed_by_name_or_replaced(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "unet.passes={OnnxConversion: {target_opset: 16}}")
    assert pipeline.submodels["unet"][0].options == {"target_opset": 16}
    assert len(pipeline.submodels["unet"]) == 2
    assert len(load(tmp_path, "unet.passes=[{pass: OnnxConversion}]").submodels["unet"]) == 1


def test_a_path_in_a_set_starts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").touch()
    monkeypatch.chdir(here)
    pipeline = load(tmp_path, "model=model.safetensors")
    assert pipeline.model == str(here / "model.safetensors")
    assert pipeline.model_mark.file == "--set model=model.safetensors"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("3", 3), ("-1.5", -1.5), ("true", True), ("no", "no"), ("null", None), ("", None), ("'3'", "3")),
        *(("[1, a]", [1, "a"]), ("{a: {b: 1}}", {"a": {"b": 1}}), ("a=b", "a=b"), ("1e-7", 1e-7), ('""', "")),
        *(("a cat: sitting, #1 & happy", "a cat: sitting, #1 & happy"), ("- x", "- x"), ("synthetic:sd15?seed=1",) * 2),
    ],
)
def test_a_value_has_the_type_that_yaml_gives_it(written: str, value: object) -> None:
    problems = Problems()
    (override,) = parse_overrides([f"name={written}"], problems)
    problems.check()
    assert to_data(override.value) == value


@given(st.one_of(st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_number_or_boolean_comes_back_as_it_was_written(value: Any) -> None:
    import json

    problems = Problems()
    (override,) = parse_overrides([f"evaluate.image.seed={json.dumps(value)}"], problems)
    problems.check()
    found = to_data(override.value)
    assert found == value and type(found) is type(value)
