"""`extends`, overlays per target and changes to chains: who wins over whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sdflow.config import load_workflow
from sdflow.config.nodes import parse
from sdflow.config.patch import merge_documents, patch_chain
from sdflow.config.problems import Problems
from sdflow.config.tree import Node, YamlList, YamlMap, to_data
from sdflow.config.workflow import PipelineSpec
from sdflow.errors import WorkflowError

from .workflow_catalog import SmallCatalog

# A key tells what kind of value it has, as in every valid workflow; where kinds change, merging is not associative.
LEAVES: dict[str, st.SearchStrategy[Any]] = {"l": st.lists(st.integers(0, 9), max_size=3), "s": st.integers(0, 9)}
SHALLOW = st.fixed_dictionaries({}, optional=LEAVES)
TREES = st.fixed_dictionaries(
    {},
    optional={"m": st.fixed_dictionaries({}, optional={"m": SHALLOW, "n": SHALLOW, **LEAVES}), "n": SHALLOW, **LEAVES},
)
LAWS = settings(max_examples=80, deadline=None)


def node(data: object, file: str = "w.yaml") -> Node:
    problems = Problems()
    parsed = parse(yaml.safe_dump(data), file, problems)
    problems.check()
    assert parsed is not None
    return parsed


def merge(base: Node, over: Node) -> Node:
    return merge_documents(base, over, Problems())


def merged(*layers: object) -> object:
    result = node(layers[0])
    for layer in layers[1:]:
        result = merge(result, node(layer))
    return to_data(result)


@LAWS
@given(TREES, TREES, TREES)
def test_merging_is_associative_where_no_key_changes_its_kind(a: object, b: object, c: object) -> None:
    assert to_data(merge(merge(node(a), node(b)), node(c))) == to_data(merge(node(a), merge(node(b), node(c))))


@LAWS
@given(TREES, TREES)
def test_merging_is_idempotent_and_keeps_what_only_the_base_has(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert merged(a, a) == a
    assert merged(a, {}) == a == merged({}, a)
    assert merged(a, b, b) == merged(a, b)
    result = merged(a, b)
    assert isinstance(result, dict)
    assert set(result) == {*a, *b}
    assert all(result[key] == a[key] for key in a if key not in b)


@LAWS
@given(TREES, st.lists(st.integers(), max_size=3))
def test_lists_replace_and_null_replaces(a: dict[str, Any], new: list[int]) -> None:
    assert merged({**a, "l": [1, 2, 3]}, {"l": new}) == {**a, "l": new}
    assert merged(a, {"m": None}) == {**a, "m": None}


@LAWS
@given(TREES, TREES)
def test_every_value_keeps_the_file_it_came_from(a: dict[str, Any], b: dict[str, Any]) -> None:
    def check(result: Node, base: Any, over: Any) -> None:
        if isinstance(result, YamlMap):
            for key, value in result.entries.items():
                check(value, base.get(key) if base else None, over.get(key) if over else None)
        else:
            assert result.mark.file == ("a.yaml" if over is None else "b.yaml")

    check(merge(node(a, "a.yaml"), node(b, "b.yaml")), a, b)


STEPS = st.lists(
    st.fixed_dictionaries({"pass": st.sampled_from("ABC")}, optional={"x": st.integers(0, 9), "o": TREES}), max_size=4
)
CHANGES = st.dictionaries(
    st.sampled_from("ABCD"),
    st.one_of(st.none(), st.fixed_dictionaries({}, optional={"x": st.integers(0, 9), "o": TREES})),
)


@LAWS
@given(STEPS, CHANGES)
def test_a_change_reaches_every_step_of_its_name_and_no_other(
    steps: list[dict[str, Any]], changes: dict[str, Any]
) -> None:
    chain, patch = node(steps), node(changes)
    assert isinstance(chain, YamlList) and isinstance(patch, YamlMap)
    expected = [
        merged(step, changes[step["pass"]]) if step["pass"] in changes else step
        for step in steps
        if changes.get(step["pass"], {}) is not None
    ]
    assert to_data(patch_chain(chain, patch, Problems(), lenient=True)) == expected


@LAWS
@given(STEPS, CHANGES)
def test_a_change_to_a_step_that_is_not_there_is_a_problem_unless_lenient(
    steps: list[Any], changes: dict[str, Any]
) -> None:
    problems = Problems()
    patch_chain_of = {"submodels": {"unet": {"passes": steps}}}
    merge_documents(node(patch_chain_of), node({"submodels": {"unet": {"passes": changes}}}), problems)
    assert len(problems) == len(set(changes) - {step["pass"] for step in steps})


def load(folder: Path, files: dict[str, str], **given: Any) -> dict[str, PipelineSpec]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    loaded = load_workflow(folder / "w.yaml", catalog=SmallCatalog(), **given)
    return {pipeline.target: pipeline for pipeline in loaded.pipelines}


BASE = """
model: synthetic:sd15-tiny
submodels:
  text_encoder:
    passes: [{pass: OnnxConversion}, {pass: OnnxFloatToFloat16}]
  unet:
    passes:
      - {pass: OnnxConversion}
      - {pass: OrtTransformersOptimization, model_type: unet, expect: {MultiHeadAttention: 32, BiasAdd: 16}}
      - {pass: OnnxFloatToFloat16}
  vae_decoder:
    passes: [{pass: OnnxConversion}]
  safety_checker:
    passes: [{pass: OnnxConversion}]
targets:
  cpu:
    passes:
      OnnxFloatToFloat16: null
      OrtTransformersOptimization: {optimization_options: {enable_nhwc_conv: false}}
    submodels:
      unet:
        passes:
          OrtTransformersOptimization: {opt_level: 1, expect: {BiasAdd: null, NhwcConv: 0}}
    evaluate: {image: {steps: 2}}
evaluate: {image: {steps: 20, seed: 5}, latency: {runs: 7}}
"""


def test_a_target_changes_only_what_is_different_for_it(tmp_path: Path) -> None:
    found = load(tmp_path, {"b.yaml": BASE, "w.yaml": "extends: b.yaml\ntarget: [cuda, cpu]"})
    cuda, cpu = found["cuda"], found["cpu"]
    assert [step.pass_name for step in cuda.submodels["unet"]] == [
        "OnnxConversion", "OrtTransformersOptimization", "OnnxFloatToFloat16"
    ]  # fmt: skip
    assert [step.pass_name for step in cpu.submodels["unet"]] == ["OnnxConversion", "OrtTransformersOptimization"]
    assert [step.pass_name for step in cpu.submodels["text_encoder"]] == ["OnnxConversion"]
    fused = cpu.submodels["unet"][1]
    assert fused.options == {
        "model_type": "unet", "optimization_options": {"enable_nhwc_conv": False}, "opt_level": 1
    }  # fmt: skip
    assert fused.expect == {"MultiHeadAttention": 32, "NhwcConv": 0}
    assert cuda.submodels["unet"][1].expect == {"MultiHeadAttention": 32, "BiasAdd": 16}
    assert (fused.mark.line, fused.mark.column) == (9, 9)
    assert cpu.evaluate.image and cuda.evaluate.image and cpu.evaluate.latency
    assert (cpu.evaluate.image.steps, cuda.evaluate.image.steps) == (2, 20)
    assert (cpu.evaluate.image.seed, cpu.evaluate.latency.runs) == (5, 7)


def test_a_file_wins_over_the_targets_of_what_it_extends(tmp_path: Path) -> None:
    text = (
        "extends: b.yaml\ntarget: cpu\nevaluate: {image: {steps: 9}}\n"
        "submodels: {unet: {passes: {OrtTransformersOptimization: {opt_level: 2}}}}"
    )
    cpu = load(tmp_path, {"b.yaml": BASE, "w.yaml": text})["cpu"]
    assert cpu.evaluate.image and cpu.evaluate.image.steps == 9
    assert cpu.submodels["unet"][1].options["opt_level"] == 2


def test_a_change_to_a_step_that_one_target_removed_does_not_hinder_that_target(tmp_path: Path) -> None:
    text = (
        "extends: b.yaml\ntarget: [cuda, cpu]\nsubmodels: {unet: {passes: {OnnxFloatToFloat16: {keep_io_types: true}}}}"
    )
    found = load(tmp_path, {"b.yaml": BASE, "w.yaml": text})
    assert found["cuda"].submodels["unet"][2].options == {"keep_io_types": True}
    assert len(found["cpu"].submodels["unet"]) == 2


def test_a_list_of_passes_replaces_the_chain(tmp_path: Path) -> None:
    text = "extends: b.yaml\ntarget: cpu\nsubmodels: {unet: {passes: [{pass: OnnxConversion, target_opset: 16}]}}"
    (step,) = load(tmp_path, {"b.yaml": BASE, "w.yaml": text})["cpu"].submodels["unet"]
    assert step.options == {"target_opset": 16}


def test_of_several_files_the_later_wins_and_the_file_itself_over_all(tmp_path: Path) -> None:
    files = {
        "a.yaml": "name: a\nmodel: synthetic:sd15\nallow_pickle: true",
        "b.yaml": BASE + "name: b",
        "w.yaml": "extends: [a.yaml, b.yaml]\ntarget: cpu",
    }
    pipeline = load(tmp_path, files)["cpu"]
    assert (pipeline.name, pipeline.model, pipeline.allow_pickle) == ("b", "synthetic:sd15-tiny", True)
    files["w.yaml"] += "\nname: w"
    assert load(tmp_path, files)["cpu"].name == "w"


@pytest.mark.parametrize("off", ["null", "false", "~"])
def test_a_submodel_is_switched_off_by_null_or_false(tmp_path: Path, off: str) -> None:
    text = f"extends: b.yaml\ntarget: cpu\nsubmodels: {{safety_checker: {off}}}"
    assert list(load(tmp_path, {"b.yaml": BASE, "w.yaml": text})["cpu"].submodels) == [
        "text_encoder", "unet", "vae_decoder"
    ]  # fmt: skip


def test_paths_start_from_the_file_that_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "model.safetensors").touch()
    (tmp_path / "style.safetensors").touch()
    chains = "submodels: {unet: {passes: [{pass: OnnxConversion}, {pass: LoraMerge}]}}\nevaluate: null\n"
    files = {
        "shared/b.yaml": chains + "model: model.safetensors",
        "w.yaml": "extends: shared/b.yaml\ntarget: cpu\nloras: [{file: style.safetensors, scale: 0.5}]",
    }
    pipeline = load(tmp_path, files)["cpu"]
    assert pipeline.model == str(tmp_path / "shared" / "model.safetensors")
    assert pipeline.model_mark.file == str(tmp_path / "shared" / "b.yaml")
    assert (pipeline.loras[0].reference, pipeline.loras[0].scale) == (str(tmp_path / "style.safetensors"), 0.5)


def test_a_pass_at_a_path_is_looked_up_from_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mine.py").touch()
    chains = (
        "submodels: {unet: {passes: [{pass: OnnxConversion}, {pass: 'mine.py:Mine', strength: 2}]}}\nevaluate: null"
    )
    text = "extends: shared/b.yaml\ntarget: cpu\nmodel: synthetic:sd15"
    step = load(tmp_path, {"shared/b.yaml": chains, "w.yaml": text})["cpu"].submodels["unet"][1]
    assert (step.pass_name, step.folder, step.options) == ("mine.py:Mine", tmp_path / "shared", {"strength": 2})
    with pytest.raises(WorkflowError, match=r"w\.yaml:1:60: no file 'mine.py'"):
        load(tmp_path, {"w.yaml": chains + "\ntarget: cpu\nmodel: synthetic:sd15"})


@pytest.mark.parametrize("place", ["flows", ".", "elsewhere"])
def test_a_pass_at_a_path_is_found_above_its_file_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("flows", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    script = tmp_path / place / "scripts" / "mine.py"
    script.parent.mkdir()
    script.touch()
    text = "submodels: {unet: {passes: [{pass: OnnxConversion}, {pass: 'scripts/mine.py:Mine'}]}}\nevaluate: null\n"
    (tmp_path / "flows" / "w.yaml").write_text(text + "target: cpu\nmodel: synthetic:sd15")
    (pipeline,) = load_workflow(tmp_path / "flows" / "w.yaml", catalog=SmallCatalog()).pipelines
    assert pipeline.submodels["unet"][1].folder.resolve() == (tmp_path / place).resolve()


def test_a_step_that_merges_loras_is_left_out_where_there_are_none(tmp_path: Path) -> None:
    chains = "submodels: {unet: {passes: [{pass: OnnxConversion}, {pass: LoraMerge}]}}\nevaluate: null\n"
    text = chains + "model: synthetic:sd15\ntarget: cpu\n"
    names = lambda found: [step.pass_name for step in found["cpu"].submodels["unet"]]  # noqa: E731
    assert names(load(tmp_path, {"w.yaml": text})) == ["OnnxConversion"]
    assert names(load(tmp_path, {"w.yaml": text + "loras: []"})) == ["OnnxConversion"]
    assert names(load(tmp_path, {"w.yaml": text + "loras: [{file: hf:a/b}]"})) == ["OnnxConversion", "LoraMerge"]


def test_the_files_of_a_workflow_are_all_there_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BASE)
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    (tmp_path / "w.yaml").write_text("extends: b.yaml\ntarget: cpu")
    loaded = load_workflow(tmp_path / "w.yaml", catalog=SmallCatalog())
    assert [path.name for path in loaded.files] == ["w.yaml", "b.yaml", "a.yaml"]
    assert loaded.path == tmp_path / "w.yaml"


def test_evaluate_is_on_unless_the_workflow_says_otherwise(tmp_path: Path) -> None:
    text = BASE.replace("evaluate: {image: {steps: 20, seed: 5}, latency: {runs: 7}}", "target: cuda")
    spec = load(tmp_path, {"w.yaml": text})["cuda"].evaluate
    assert spec.image and spec.latency and not spec.allow_fallback
    spec = load(tmp_path, {"w.yaml": text + "\nevaluate: null"})["cuda"].evaluate
    assert (spec.image, spec.latency) == (None, None)
    spec = load(tmp_path, {"w.yaml": text + "\nevaluate: {latency: null, allow_fallback: true}"})["cuda"].evaluate
    assert spec.image and spec.latency is None and spec.allow_fallback
