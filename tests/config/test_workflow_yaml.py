"""What the text of a workflow means: YAML 1.2's scalars, text keys, and a place for every value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sdflow.config.nodes import parse
from sdflow.config.problems import Problems
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, to_data
from sdflow.config.workflow import Mark

LOADERS = [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)]


def tree(text: str, loader: Any = None) -> Node:
    problems = Problems()
    node = parse(text, "w.yaml", problems, loader=loader)
    problems.check()
    assert node is not None
    return node


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("yes", "yes"), ("no", "no"), ("on", "on"), ("Off", "Off"), ("y", "y")),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("'null'", "null"), ('"1"', "1")),
        *(("0", 0), ("-3", -3), ("+4", 4), ("0o17", 15), ("0x1f", 31), ("1_000", "1_000"), ("1:30", "1:30")),
        *(("1e-7", 1e-7), ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), (".inf", math.inf), ("-.INF", -math.inf)),
        *(("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"), ("-", [None]), ("a: b", {"a": "b"}), ("=", "=")),
    ],
)
def test_scalars_are_those_of_yaml_1_2(written: str, value: object) -> None:
    for loader in LOADERS:
        assert to_data(tree(f"key:\n  {written}", loader)) == {"key": value}


def test_keys_are_text_as_written() -> None:
    assert to_data(tree("{17: a, null: b, on: c, 1.0: d}")) == {"17": "a", "null": "b", "on": "c", "1.0": "d"}


DATA = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False), st.text(max_size=9)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=15,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(max_size=6), DATA))
def test_what_json_says_reads_the_same_as_yaml(data: dict[str, object]) -> None:
    """JSON is YAML: every value comes back with its type, whatever the text in it looks like."""
    import json

    text = json.dumps(data).replace("Infinity", ".inf")
    if any(mark in text for mark in ("\\ud", "\x7f", '"<<"')):  # lone surrogates; what YAML has no JSON escape for
        return
    assert to_data(tree(text)) == data


def places(node: Node) -> list[tuple[str, Mark]]:
    if isinstance(node, YamlScalar):
        return [(str(node.value), node.mark)]
    items = node.items if isinstance(node, YamlList) else node.entries.values()
    found = [place for item in items for place in places(item)]
    return found + (list(node.keys.items()) if isinstance(node, YamlMap) else [])


WORD = st.text(alphabet="abcdefgé漢😀", min_size=2, max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(WORD, st.recursive(WORD, lambda inner: st.lists(inner, max_size=3), max_leaves=6)), st.booleans()
)
def test_every_value_and_key_knows_the_line_and_column_it_was_written_at(data: dict[str, object], flow: bool) -> None:
    text = yaml.safe_dump(data, allow_unicode=True, default_flow_style=flow, width=30, sort_keys=False)
    lines = text.split("\n")
    for loader in LOADERS:
        for written, mark in places(tree(text, loader)):
            assert mark.file == "w.yaml"
            assert lines[mark.line - 1][mark.column - 1 :].lstrip("'\"").startswith(written[:2])


def test_an_alias_stands_for_its_anchor() -> None:
    assert to_data(tree("a: &x {n: [1]}\nb: *x\nc: [*x, *x]")) == {
        "a": {"n": [1]}, "b": {"n": [1]}, "c": [{"n": [1]}, {"n": [1]}]
    }  # fmt: skip


def test_reading_a_workflow_imports_nothing_heavy(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, sdflow.config.workflow, sdflow.config\n"
        "assert 'pydantic' not in sys.modules and 'yaml' not in sys.modules\n"
        "from sdflow.config import load_workflow\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'olive', 'numpy', 'diffusers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
