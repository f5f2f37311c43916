"""The tree of a YAML file: conversion of values to Python and to words, and merging of trees."""

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
    """A map. `keys` holds the place of each key; each value holds its own."""

    entries: Mapping[str, Node]
    keys: Mapping[str, Mark]
    mark: Mark


Node: TypeAlias = "YamlScalar | YamlList | YamlMap"


def is_null(node: Node | None) -> bool:
    """Whether the node is missing or null."""
    return node is None or (isinstance(node, YamlScalar) and node.value is None)


def text_of(node: Node | None) -> str | None:
    """The node's text; None if it is empty or not text."""
    return node.value if isinstance(node, YamlScalar) and isinstance(node.value, str) and node.value else None


def as_map(node: Node, kind: str, what: str, problems: Problems) -> YamlMap | None:
    """The node if it is a map; otherwise None, reported by `expect_kind`."""
    if isinstance(node, YamlMap):
        return node
    expect_kind(node, kind, what, problems)
    return None


def expect_kind(node: Node, kind: str, what: str, problems: Problems) -> None:
    """Report that `what` must be `kind`."""
    problems.add(node.mark, f"{what} must be {kind}, found {describe(node)}")


def to_data(node: Node) -> Any:
    """The tree as plain Python values."""
    if isinstance(node, YamlMap):
        return {key: to_data(value) for key, value in node.entries.items()}
    if isinstance(node, YamlList):
        return [to_data(item) for item in node.items]
    return node.value


def describe(node: Node) -> str:
    """Name a value's kind in a message."""
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
    """Shorten text for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
