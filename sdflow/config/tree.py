"""The tree of a YAML file: what a value is, in code and in words, and how one tree is laid over another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sdflow.config.problems import Problems
from sdflow.config.workflow import Mark

Value: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, slots=True)
class YamlScalar:
    """One value: text, a number, true, false or null."""

    value: Value
    mark: Mark


@dataclass(frozen=True, slots=True)
class YamlList:
    """A list."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class YamlMap:
    """A map. `keys` holds the place of each key; the place of its value is in the value."""

    entries: Mapping[str, Node]
    keys: Mapping[str, Mark]
    mark: Mark


Node: TypeAlias = "YamlScalar | YamlList | YamlMap"


def is_null(node: Node | None) -> bool:
    """Whether nothing is written there, or null."""
    return node is None or (isinstance(node, YamlScalar) and node.value is None)


def text_of(node: Node | None) -> str | None:
    """The text that is written there; None for an empty one, and for anything else."""
    return node.value if isinstance(node, YamlScalar) and isinstance(node.value, str) and node.value else None


def as_map(node: Node, kind: str, what: str, problems: Problems) -> YamlMap | None:
    """The map that is written there; None for anything else, which is reported as by `expect_kind`."""
    if isinstance(node, YamlMap):
        return node
    expect_kind(node, kind, what, problems)
    return None


def expect_kind(node: Node, kind: str, what: str, problems: Problems) -> None:
    """Reports that `what` should have been written as `kind`."""
    problems.add(node.mark, f"{what} must be {kind}, found {describe(node)}")


def merge(base: Node, over: Node) -> Node:
    """`over` laid upon `base`: maps merge at every depth, lists and scalars (null too) replace."""
    if not (isinstance(base, YamlMap) and isinstance(over, YamlMap)):
        return over
    entries = dict(base.entries)
    for key, value in over.entries.items():
        entries[key] = merge(entries[key], value) if key in entries else value
    return YamlMap(entries, {**base.keys, **over.keys}, over.mark)


def to_data(node: Node) -> Any:
    """The tree as plain Python values."""
    if isinstance(node, YamlMap):
        return {key: to_data(value) for key, value in node.entries.items()}
    if isinstance(node, YamlList):
        return [to_data(item) for item in node.items]
    return node.value


def describe(node: Node) -> str:
    """What a value is, in words for a message."""
    if isinstance(node, YamlMap):
        return "a map"
    if isinstance(node, YamlList):
        return "a list"
    if node.value is None:
        return "null"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    if isinstance(node.value, str):
        return f"the text {shortened(node.value)!r}"
    return f"the number {node.value}"


def shortened(text: str) -> str:
    """Text that fits into a message."""
    return text if len(text) <= 60 else text[:57] + "..."
