"""How one YAML tree is laid over another: maps merge, everything else replaces."""

from __future__ import annotations

from sdflow.config.nodes import Node, YamlMap, describe
from sdflow.config.problems import Problems


def merge(base: Node, over: Node) -> Node:
    """`over` laid upon `base`: maps merge at every depth, lists and scalars (null too) replace."""
    if not (isinstance(base, YamlMap) and isinstance(over, YamlMap)):
        return over
    entries = dict(base.entries)
    for key, value in over.entries.items():
        entries[key] = merge(entries[key], value) if key in entries else value
    return YamlMap(entries, {**base.keys, **over.keys}, over.mark)


def expect_kind(node: Node, kind: str, what: str, problems: Problems) -> None:
    """Reports that `what` should have been written as `kind`."""
    problems.add(node.mark, f"{what} must be {kind}, found {describe(node)}")
