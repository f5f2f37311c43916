"""Whatever the bytes of a workflow file are, loading it gives a Workflow or a WorkflowError, in bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sdflow.config import load_workflow
from sdflow.config.fields import MATRIX, OVERLAY, STEP, WORKFLOW, EvaluateFields, ImageFields, LoraFields
from sdflow.config.nodes import parse
from sdflow.config.problems import Problems
from sdflow.config.workflow import Workflow
from sdflow.errors import WorkflowError
from sdflow.families import any_family
from sdflow.targets import TARGETS

from .workflow_catalog import PASSES, SmallCatalog

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

WORDS = st.sampled_from(
    sorted(
        {
            *(*WORKFLOW, *MATRIX, *OVERLAY, *STEP, *any_family.submodels(), *TARGETS, *PASSES),
            *(*EvaluateFields.model_fields, *ImageFields.model_fields, *LoraFields.model_fields),
            *("passes", "target_opset", "opt_level", "model_type", "optimization_options", "op_block_list"),
            *("synthetic:sd15", "sample:shapes", "hf:a/b@c", "./", "../x.yaml", "w.yaml", "\0", "~nobody/x", "a" * 300),
        }
    )
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS, st.dates(), st.binary(max_size=4)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, SCALARS), inner, max_size=5)),
    max_leaves=25,
)
WORKFLOWS = st.dictionaries(st.sampled_from(sorted(WORKFLOW)), TREES)

SKELETON = {
    "model": "synthetic:sd15-tiny",
    "target": "cpu",
    "submodels": {
        "text_encoder": {"passes": [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]},
        "unet": {"passes": [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}, {"pass": "OnnxFloatToFloat16"}]},
        "vae_decoder": {"passes": [{"pass": "OnnxConversion"}]},
    },
}


def outcome(path: Path, **given: list[str]) -> Workflow | WorkflowError:
    try:
        return load_workflow(path, catalog=SmallCatalog(), **given)
    except WorkflowError as error:
        assert error.problems and all(problem.message for problem in error.problems)
        return error


@FUZZ
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\xfe\x00a")
@example(b"\xef\xbb\xbfmodel: x")
@example(b'a: "\\uD800"')
@example(b'a: "\\U00110000"')
@example(b"%YAML 9999999999999999999.1\n---\na: 1")
@example(b"%TAG ! tag:%ff\n--- !a b")
@example(b"? [a, b]\n: c")
@example(b"? *a\n: c")
@example(b"&a {x: *a}")
@example(b"--- 1\n--- 2")
@example(b"a: \x00b")
@example(b"a: 0x" + b"f" * 5000)
@example(b"a: " + b"9" * 5000)
def test_any_bytes_give_a_workflow_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(data)
    assert isinstance(outcome(path), WorkflowError)


@FUZZ
@given(st.text(alphabet="abc:-[]{}#&*!|>'\"%@`?, \n\t0.~<=\x85\u2028\ufeff", max_size=60))
def test_any_text_is_parsed_or_refused_by_both_of_pyyamls_parsers(text: str) -> None:
    for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        problems = Problems()
        assert parse(text, "w.yaml", problems, loader=loader) is not None or len(problems)


@FUZZ
@given(WORKFLOWS)
def test_any_tree_under_known_keys_gives_a_workflow_or_a_workflow_error(
    tmp_path: Path, tree: dict[str, object]
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    outcome(path)


@FUZZ
@given(st.dictionaries(st.sampled_from(sorted(WORKFLOW)), TREES, min_size=1, max_size=2))
def test_any_tree_over_a_good_workflow_gives_a_workflow_or_a_workflow_error(
    tmp_path: Path, tree: dict[str, object]
) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(SKELETON))
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump({"extends": "base.yaml", **tree}), encoding="utf-8")
    outcome(path)


@FUZZ
@given(st.lists(st.one_of(st.text(max_size=30), st.builds("{}={}".format, st.lists(WORDS).map(".".join), TREES))))
@example(["unet.passes.99999999999999999999.x=1"])
@example(["unet.passes.²=1"])
@example(["evaluate" + ".a" * 5000 + "=1"])
@example(["name={" * 5000])
def test_any_set_gives_a_workflow_or_a_workflow_error(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(SKELETON))
    outcome(path, overrides=overrides)


BOMBS = {
    "aliases that unfold to a billion": "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)),
    "aliases that nest deeply": "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 300)),
    "nested lists": "a: " + "[" * 100_000,
    "nested maps": "{a: " * 100_000,
    "nested blocks": "\n".join(" " * n + "a:" for n in range(900)),
    "two megabytes": "a: " + "x" * 2_000_000,
    "many keys": "\n".join(f"k{n}: 1" for n in range(60_000)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_made_to_exhaust_the_reader_is_refused_quickly(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(BOMBS[bomb])
    began = time.process_time()
    assert isinstance(outcome(path), WorkflowError)
    assert time.process_time() - began < 3


def test_paths_that_are_no_files_give_a_workflow_error(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("missing.yaml", "loop.yaml", "folder.yaml", "a\0b", "x" * 300, "folder.yaml/x.yaml", "loop.yaml/x"):
        assert isinstance(outcome(tmp_path / name), WorkflowError), name


def test_files_that_extend_each_other_a_million_ways_are_read_once_each(tmp_path: Path) -> None:
    for n in range(20):
        (tmp_path / f"f{n}.yaml").write_text(f"extends: [f{n + 1}.yaml, f{n + 1}.yaml]")
    (tmp_path / "f20.yaml").write_text(yaml.safe_dump(SKELETON))
    loaded = outcome(tmp_path / "f0.yaml")
    assert isinstance(loaded, Workflow)
    assert len(loaded.files) == 21
