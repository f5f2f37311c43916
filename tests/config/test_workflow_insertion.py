"""Steps that are inserted into an inherited chain, and changes for a target to steps that there are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sdflow.config import load_workflow
from sdflow.config.nodes import parse
from sdflow.config.patch import patch_chain
from sdflow.config.problems import Problems
from sdflow.config.tree import YamlList, YamlMap, to_data
from sdflow.config.workflow import PipelineSpec
from sdflow.errors import Problem, WorkflowError

from .workflow_catalog import SmallCatalog

BASE = """
model: synthetic:sd15-tiny
evaluate: null
submodels:
  unet:
    passes:
      - {pass: OnnxConversion}
      - {pass: OrtTransformersOptimization, model_type: unet}
      - {pass: OnnxFloatToFloat16}
  vae_decoder:
    passes: [{pass: OnnxConversion}, {pass: OnnxFloatToFloat16}]
targets:
  cpu:
    passes: {OnnxFloatToFloat16: null, QuantizeFp8: {limit: 1}}
"""
HEAD = "extends: b.yaml\ntarget: cuda\n"


def loaded(folder: Path, text: str, more: dict[str, str] | None = None, **given: Any) -> dict[str, PipelineSpec]:
    """The pipelines of a workflow, by target."""
    for name, content in {"b.yaml": BASE, "w.yaml": text, **(more or {})}.items():
        (folder / name).write_text(content)
    pipelines = load_workflow(folder / "w.yaml", catalog=SmallCatalog(), **given).pipelines
    return {pipeline.target: pipeline for pipeline in pipelines}


def names(pipeline: PipelineSpec, submodel: str = "unet") -> list[str]:
    return [step.pass_name for step in pipeline.submodels[submodel]]


def problems(folder: Path, text: str, more: dict[str, str] | None = None, **given: Any) -> list[Problem]:
    with pytest.raises(WorkflowError) as caught:
        loaded(folder, text, more, **given)
    return list(caught.value.problems)


def unet(changes: str) -> str:
    return f"{HEAD}submodels: {{unet: {{passes: {changes}}}}}"


PLACES = {
    "{SubpixelConv: {insert_before: OnnxFloatToFloat16}}": "CO+H",
    "{SubpixelConv: {insert_after: OnnxConversion}}": "C+OH",
    "{SubpixelConv: {insert_after: OnnxFloatToFloat16}}": "COH+",
    "{SubpixelConv: {insert_after: OnnxConversion}, ConvBiasFusion: {insert_after: OnnxConversion}}": "C+BOH",
    "{SubpixelConv: {insert_before: OnnxFloatToFloat16}, ConvBiasFusion: {insert_before: OnnxFloatToFloat16}}": "CO+BH",
    "{ConvBiasFusion: {insert_after: SubpixelConv}, SubpixelConv: {insert_after: OnnxConversion}}": "C+BOH",
    "{SubpixelConv: {insert_before: OnnxFloatToFloat16}, OnnxFloatToFloat16: null}": "CO+",
    "{SubpixelConv: {insert_after: OnnxConversion, insert_before: null}}": "C+OH",
}
SHORT = {
    "OnnxConversion": "C", "OrtTransformersOptimization": "O", "OnnxFloatToFloat16": "H", "SubpixelConv": "+",
    "ConvBiasFusion": "B",
}  # fmt: skip


@pytest.mark.parametrize("changes", PLACES)
def test_a_step_is_inserted_where_the_map_says(tmp_path: Path, changes: str) -> None:
    found = names(loaded(tmp_path, unet(changes))["cuda"])
    assert "".join(SHORT[name] for name in found) == PLACES[changes]


def test_an_inserted_step_has_its_options_its_counts_and_its_own_place(tmp_path: Path) -> None:
    changes = "{QuantizeInt8: {insert_after: OrtTransformersOptimization, limit: 0.5, expect: {MatMul: 3}}}"
    text = unet(changes)
    step = loaded(tmp_path, text)["cuda"].submodels["unet"][2]
    assert (step.pass_name, step.options, step.expect) == ("QuantizeInt8", {"limit": 0.5}, {"MatMul": 3})
    assert (Path(step.mark.file).name, step.mark.line) == ("w.yaml", 3)
    assert step.mark.column == text.splitlines()[2].index("QuantizeInt8") + 1


def test_a_pass_of_ones_own_is_inserted_and_found_from_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mine.py").touch()
    middle = "extends: ../b.yaml\nsubmodels: {unet: {passes: {'mine.py:Mine': {insert_before: OnnxFloatToFloat16, strength: 2}}}}"
    text = "extends: shared/m.yaml\ntarget: cuda\nsubmodels: {unet: {passes: {SubpixelConv: {insert_after: 'mine.py:Mine'}}}}"
    pipeline = loaded(tmp_path, text, {"shared/m.yaml": middle})["cuda"]
    assert names(pipeline) == [
        "OnnxConversion", "OrtTransformersOptimization", "mine.py:Mine", "SubpixelConv", "OnnxFloatToFloat16"
    ]  # fmt: skip
    mine = pipeline.submodels["unet"][2]
    assert (mine.folder, mine.options) == (tmp_path / "shared", {"strength": 2})


def test_what_a_base_inserts_is_a_step_like_any_other(tmp_path: Path) -> None:
    middle = "extends: b.yaml\nsubmodels: {unet: {passes: {QuantizeInt8: {insert_after: OnnxConversion}}}}"
    more = {"m.yaml": middle}
    head = "extends: m.yaml\ntarget: [cuda, cpu]\n"
    changed = loaded(tmp_path, head + "submodels: {unet: {passes: {QuantizeInt8: {limit: 2.0}}}}", more)
    assert [names(pipeline)[1] for pipeline in changed.values()] == ["QuantizeInt8"] * 2
    assert all(pipeline.submodels["unet"][1].options == {"limit": 2.0} for pipeline in changed.values())
    removed = loaded(tmp_path, head + "submodels: {unet: {passes: {QuantizeInt8: null}}}", more)
    assert all("QuantizeInt8" not in names(pipeline) for pipeline in removed.values())
    for_one = loaded(tmp_path, head + "targets: {cpu: {submodels: {unet: {passes: {QuantizeInt8: null}}}}}", more)
    assert ["QuantizeInt8" in names(for_one[target]) for target in ("cuda", "cpu")] == [True, False]


def test_a_step_is_inserted_for_one_target_alone(tmp_path: Path) -> None:
    text = (
        "extends: b.yaml\ntarget: [cuda, cpu]\n"
        "targets: {cuda: {submodels: {unet: {passes: {SubpixelConv: {insert_after: OnnxConversion}}}}}}"
    )
    found = loaded(tmp_path, text)
    assert names(found["cuda"])[:2] == ["OnnxConversion", "SubpixelConv"]
    assert names(found["cuda"], "vae_decoder") == ["OnnxConversion", "OnnxFloatToFloat16"]
    assert "SubpixelConv" not in names(found["cpu"])


def test_a_target_inserts_into_every_chain_that_has_the_step_it_names(tmp_path: Path) -> None:
    text = (
        "extends: b.yaml\ntarget: cuda\ntargets: {cuda: {passes: {"
        "SubpixelConv: {insert_after: OrtTransformersOptimization}, ConvBiasFusion: {insert_after: SubpixelConv},"
        " NhwcResize: {insert_before: OnnxFloatToFloat16}}}}"
    )
    pipeline = loaded(tmp_path, text)["cuda"]
    assert names(pipeline) == [
        "OnnxConversion", "OrtTransformersOptimization", "SubpixelConv", "ConvBiasFusion", "NhwcResize",
        "OnnxFloatToFloat16",
    ]  # fmt: skip
    assert names(pipeline, "vae_decoder") == ["OnnxConversion", "NhwcResize", "OnnxFloatToFloat16"]


def test_a_file_that_is_laid_over_another_inserts_into_its_chains(tmp_path: Path) -> None:
    mixin = "submodels: {unet: {passes: {SubpixelConv: {insert_after: OnnxConversion}}}}"
    text = "extends: [b.yaml, mixin.yaml]\nmatrix: {target: [cuda, cpu], model: [synthetic:sd15, synthetic:sd15-tiny]}"
    (tmp_path / "b.yaml").write_text(BASE)
    (tmp_path / "mixin.yaml").write_text(mixin)
    (tmp_path / "w.yaml").write_text(text)
    pipelines = load_workflow(tmp_path / "w.yaml", catalog=SmallCatalog()).pipelines
    assert len(pipelines) == 4
    assert all(names(pipeline)[1] == "SubpixelConv" for pipeline in pipelines)


def test_among_several_steps_of_a_name_it_is_before_the_first_and_after_the_last(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    chain = "[{pass: OnnxConversion}, {pass: 'mine.py:A'}, {pass: NhwcResize}, {pass: 'mine.py:A'}]"
    base = f"model: synthetic:sd15\nevaluate: null\nsubmodels: {{unet: {{passes: {chain}}}}}"
    changes = "{SubpixelConv: {insert_before: 'mine.py:A'}, ConvBiasFusion: {insert_after: 'mine.py:A'}}"
    found = names(loaded(tmp_path, unet(changes), {"b.yaml": base})["cuda"])
    assert found[1:] == ["SubpixelConv", "mine.py:A", "NhwcResize", "mine.py:A", "ConvBiasFusion"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["unet.passes.QuantizeInt8.insert_after=OnnxConversion", "unet.passes.QuantizeInt8.limit=0.5"],
        ["unet.passes={QuantizeInt8: {insert_after: OnnxConversion, limit: 0.5}}"],
    ],
)
def test_a_set_inserts_a_step(tmp_path: Path, overrides: list[str]) -> None:
    for target, pipeline in loaded(tmp_path, "extends: b.yaml\ntarget: [cuda, cpu]", overrides=overrides).items():
        step = pipeline.submodels["unet"][1]
        assert (step.pass_name, step.options) == ("QuantizeInt8", {"limit": 0.5}), target


WRONG = {
    "an unknown anchor": (
        "{SubpixelConv: {insert_after: OnnxConvertion}}",
        "OnnxConvertion",
        "no step 'OnnxConvertion' to insert SubpixelConv after",
        "'OnnxConversion'",
    ),
    "an anchor of another chain": (
        "{SubpixelConv: {insert_after: LoraMerge}}",
        "LoraMerge",
        "no step 'LoraMerge'",
        "known: OnnxConversion, Ort",
    ),
    "an anchor that is no text": (
        "{SubpixelConv: {insert_before: [OnnxConversion]}}",
        "[",
        "`insert_before` must be the name of a pass",
        None,
    ),
    "both places": (
        "{SubpixelConv: {insert_before: OnnxFloatToFloat16, insert_after: OnnxConversion}}",
        "insert_after",
        "cannot have both",
        "leave one",
    ),
    "a step that is there": (
        "{OnnxFloatToFloat16: {insert_after: OnnxConversion}}",
        "OnnxFloatToFloat16",
        "already has a step 'OnnxFloatToFloat16', from",
        "leave out insert_after",
    ),
    "an unknown pass": (
        "{SubpixelCnv: {insert_after: OnnxConversion}}",
        "SubpixelCnv",
        "unknown pass 'SubpixelCnv'",
        "'SubpixelConv'",
    ),
    "an unknown option": (
        "{QuantizeInt8: {insert_after: OnnxConversion, limt: 3}}",
        "limt",
        "unknown option 'limt'",
        "'limit'",
    ),
    "a missing option": (
        "{OrtTransformersOptimization: {insert_after: OnnxConversion}, OnnxFloatToFloat16: null}",
        "OrtTransformersOptimization",
        "already",
        None,
    ),
    "before the export": (
        "{SubpixelConv: {insert_before: OnnxConversion}}",
        "SubpixelConv",
        "needs an ONNX model",
        "begin with",
    ),
    "a place that is misspelt": (
        "{SubpixelConv: {insert_aftr: OnnxConversion}}",
        "SubpixelConv",
        "no step 'SubpixelConv' to change",
        "insert_after",
    ),
    "in a list": (
        "[{pass: OnnxConversion}, {pass: SubpixelConv, insert_after: OnnxConversion}]",
        "insert_after",
        "steps of a list run in the order written",
        "leave it out",
    ),
    "another pass": (
        "{SubpixelConv: {insert_after: OnnxConversion, pass: NhwcResize}}",
        "pass:",
        "cannot replace a step's pass",
        None,
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_an_insertion_is_reported_where_it_is(tmp_path: Path, mistake: str) -> None:
    changes, place, message, remedy = WRONG[mistake]
    text = unet(changes)
    found = problems(tmp_path, text)
    assert len(found) >= 1
    line = text.splitlines()[2]
    at = line.index(place, line.index(changes) + 1) + 1
    told = [each for each in found if (each.line, each.column) == (3, at)]
    if mistake == "before the export":  # and what was first is not any more
        assert len(found) == 2
    else:
        assert found == told, f"{at}: {found}"
    assert message in told[0].message
    assert remedy is None or (told[0].remedy and remedy in told[0].remedy)


def test_steps_that_are_inserted_beside_each_other_are_a_mistake(tmp_path: Path) -> None:
    found = problems(
        tmp_path, unet("{SubpixelConv: {insert_after: NhwcResize}, NhwcResize: {insert_after: SubpixelConv}}")
    )
    assert len(found) == 2
    assert all("each inserted next to the other" in each.message for each in found)


def test_an_anchor_that_a_target_removes_is_a_mistake_for_that_target(tmp_path: Path) -> None:
    text = (
        "extends: b.yaml\ntarget: [cuda, cpu]\n"
        "submodels: {unet: {passes: {SubpixelConv: {insert_before: OnnxFloatToFloat16}}}}"
    )
    (found,) = problems(tmp_path, text)
    assert (found.line, found.column) == (3, text.splitlines()[2].index("OnnxFloat") + 1)
    assert "the chain for cpu has no step 'OnnxFloatToFloat16'" in found.message
    assert names(loaded(tmp_path, text, targets=["cuda"])["cuda"])[2] == "SubpixelConv"


def test_two_layers_cannot_insert_the_same_step(tmp_path: Path) -> None:
    base = BASE + "  cuda: {submodels: {unet: {passes: {SubpixelConv: {insert_after: OnnxConversion}}}}}\n"
    (found,) = problems(tmp_path, unet("{SubpixelConv: {insert_after: OnnxConversion}}"), {"b.yaml": base})
    assert "for cuda already has a step 'SubpixelConv', from" in found.message
    assert "b.yaml" in found.message


# Changes for a target


UNUSED = {
    "in every chain": "{passes: {SubpixelConv: {expect: {Resize: 0}}}}",
    "in one chain": "{submodels: {vae_decoder: {passes: {OrtTransformersOptimization: {opt_level: 1}}}}}",
    "removed": "{passes: {SubpixelConv: null}}",
    "removed in one chain": "{submodels: {vae_decoder: {passes: {OrtTransformersOptimization: null}}}}",
    "beside nothing": "{passes: {SubpixelConv: {insert_after: ConvBiasFusion}}}",
    "beside nothing in one chain": "{submodels: {vae_decoder: {passes: {SubpixelConv: {insert_after: ConvBiasFusion}}}}}",
}


@pytest.mark.parametrize("target", ["cuda", "directml"])
@pytest.mark.parametrize("kind", UNUSED)
def test_a_change_for_a_target_that_its_chains_have_no_step_for_is_a_mistake(
    tmp_path: Path, kind: str, target: str
) -> None:
    """For the target that is built, and for one that is not."""
    line = f"targets: {{{target}: {UNUSED[kind]}}}"
    (found,) = problems(tmp_path, HEAD + line)
    place = "ConvBiasFusion" if "beside" in kind else "Ort" if "Ort" in line else "SubpixelConv"
    assert (Path(found.file).name, found.line, found.column) == ("w.yaml", 3, line.index(place) + 1)
    assert f"for {target} has " in found.message or f"chain for {target}" in found.message
    assert found.remedy


def test_a_change_for_a_target_names_the_nearest_step(tmp_path: Path) -> None:
    text = HEAD + "targets: {cuda: {passes: {OnnxFloatToFloat16: null, QuantizeInt8: {}, LoraMerge: null}}}"
    assert [each.message for each in problems(tmp_path, text)] == [
        "no chain for cuda has a step 'QuantizeInt8' to change",
        "no chain for cuda has a step 'LoraMerge' to change",
    ]
    text = HEAD + "targets: {cuda: {submodels: {unet: {passes: {OnnxFloatToFlot16: null}}}}}"
    (found,) = problems(tmp_path, text)
    assert found.remedy == "did you mean 'OnnxFloatToFloat16'?"


def test_what_is_inherited_may_change_steps_that_there_are_not(tmp_path: Path) -> None:
    """BASE changes QuantizeFp8, which no chain of it has: it is for others too."""
    assert names(loaded(tmp_path, "extends: b.yaml\ntarget: cpu")["cpu"], "vae_decoder") == ["OnnxConversion"]


def test_a_step_that_is_removed_already_may_be_removed_again(tmp_path: Path) -> None:
    text = "extends: b.yaml\ntarget: cpu\ntargets: {cpu: {passes: {OnnxFloatToFloat16: null}}}"
    assert names(loaded(tmp_path, text)["cpu"], "vae_decoder") == ["OnnxConversion"]
    text = text.replace("null}}}", "{keep_io_types: true}}}}")
    (found,) = problems(tmp_path, text)
    assert "no chain for cpu has a step 'OnnxFloatToFloat16' to change" in found.message


# For any chain and any map


STEPS = st.lists(st.sampled_from("ABC"), max_size=4)
INSERTED = st.dictionaries(
    st.sampled_from("UVWX"),
    st.tuples(st.sampled_from(["insert_before", "insert_after"]), st.sampled_from("ABCUVWX")),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, INSERTED)
def test_what_was_there_keeps_its_order_and_each_insertion_is_placed_or_told(
    steps: list[str], inserted: dict[str, tuple[str, str]]
) -> None:
    found = Problems()
    chain = parse(yaml.safe_dump([{"pass": name} for name in steps]), "b.yaml", found)
    patch = parse(yaml.safe_dump({name: dict([each]) for name, each in inserted.items()}), "w.yaml", found)
    assert isinstance(chain, YamlList) and isinstance(patch, YamlMap)
    result = [step["pass"] for step in to_data(patch_chain(chain, patch, found))]
    assert [name for name in result if name in "ABC"] == steps
    placed = [name for name in result if name in "UVWX"]
    assert len(placed) == len(set(placed)) == len(inserted) - len(found)
    for name in placed:
        place, anchor = inserted[name]
        at = [index for index, each in enumerate(result) if each == anchor]
        assert result.index(name) < at[0] if place == "insert_before" else result.index(name) > at[-1]
