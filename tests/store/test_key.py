"""The key, and what is said of two keys that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sdflow.artifact import Action
from sdflow.build.explain import explain

from .builds import make_action

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=15
)
contents = st.dictionaries(st.text(), values, max_size=6)

CONTENT: dict[str, Any] = {
    "format": 1,
    "pass": {"name": "LoraMerge", "version": 3},
    "config": {"opt_level": 0, "float16": True, "keep": ["Attention"], "shapes": {"batch": 2}, "none": None},
    "submodel": "unet",
    "inputs": {"model": "0" * 64, "loras": [{"sha256": "1" * 64, "scale": 0.8}, {"sha256": "2" * 64, "scale": 1.0}]},
    "uses": {"onnxruntime": "1.31.1", "olive-ai": "0.13.1"},
    "user_scripts": {"mine.py": "3" * 64},
    "salt": "",
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def shuffled(value: Any, order: st.DataObject) -> Any:
    if isinstance(value, dict):
        keys = order.draw(st.permutations(list(value)))
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(st.sampled_from(list(leaves(CONTENT))), scalars)
def test_every_key_field_changes_the_digest(path: tuple[Any, ...], new: Any) -> None:
    old = at(CONTENT, path)
    changed = Action(replaced(CONTENT, path, new))
    same = type(old) is type(new) and old == new
    assert (changed.digest == Action(CONTENT).digest) == same
    assert bool(explain(Action(CONTENT), changed)) != same


@settings(deadline=None)
@given(contents, st.data())
def test_the_order_of_keys_does_not_change_the_digest(content: dict[str, Any], order: st.DataObject) -> None:
    assert Action(shuffled(content, order)).digest == Action(content).digest


@settings(deadline=None)
@given(contents, contents)
def test_explain_finds_a_difference_exactly_when_the_digests_differ(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert bool(explain(Action(old), Action(new))) == (Action(old).digest != Action(new).digest)
    assert explain(Action(old), Action(old)) == ()


def test_a_true_is_not_a_one() -> None:
    actions = [make_action(value=value) for value in (1, True, 1.0, "1", [1], None)]
    assert len({action.digest for action in actions}) == len(actions)
    assert explain(actions[0], actions[1]) == ("option value: 1 -> true",)


def change(path: tuple[Any, ...], new: Any) -> tuple[str, ...]:
    return explain(Action(CONTENT), Action(replaced(CONTENT, path, new)))


def test_explain_says_in_words_what_differs() -> None:
    assert explain(None, Action(CONTENT)) == ("first build",)
    assert change(("config", "opt_level"), 1) == ("option opt_level: 0 -> 1",)
    assert change(("config", "shapes", "batch"), 1) == ("option shapes.batch: 2 -> 1",)
    assert change(("config", "keep"), ["Attention", "GroupNorm"]) == (
        'option keep: ["Attention"] -> ["Attention","GroupNorm"]',
    )
    assert change(("uses", "onnxruntime"), "1.32.0") == ("uses onnxruntime: 1.31.1 -> 1.32.0",)
    assert change(("inputs", "loras", 0, "scale"), 0.5) == ("lora 1 scale: 0.8 -> 0.5",)
    assert change(("inputs", "loras", 1, "sha256"), "f" * 64) == (f"lora 2 sha256: {'2' * 12} -> {'f' * 12}",)
    assert change(("inputs", "model"), "f" * 64) == (f"output of the step before: {'0' * 12} -> {'f' * 12}",)
    assert change(("pass", "version"), 4) == ("version of the pass: 3 -> 4",)
    assert change(("user_scripts", "mine.py"), "f" * 64) == (f"user script mine.py: {'3' * 12} -> {'f' * 12}",)
    assert change(("salt",), "mine") == ("salt: '' -> mine",)
    assert change(("uses",), {"onnxruntime": "1.31.1"}) == ("uses olive-ai: removed, was 0.13.1",)
    assert change(("inputs", "loras"), CONTENT["inputs"]["loras"][:1]) == (
        "lora 2 scale: removed, was 1.0",
        f"lora 2 sha256: removed, was {'2' * 12}",
    )
    checkpoint = replaced(CONTENT, ("inputs", "model"), {"kind": "synthetic", "seed": 0})
    other = replaced(CONTENT, ("inputs", "model"), {"kind": "synthetic", "seed": 1})
    assert explain(Action(checkpoint), Action(other)) == ("checkpoint seed: 0 -> 1",)


def test_explain_tells_all_that_differs_at_once() -> None:
    new = replaced(replaced(CONTENT, ("config", "opt_level"), 2), ("uses", "onnxruntime"), "1.32.0")
    assert explain(Action(CONTENT), Action(new)) == (
        "option opt_level: 0 -> 2",
        "uses onnxruntime: 1.31.1 -> 1.32.0",
    )
