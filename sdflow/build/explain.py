"""Describe the differences between two actions of a step: why it is rebuilt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import canonical_json

Leaf = tuple[str | int, ...]
_DIGEST = re.compile(r"[0-9a-f]{40,64}")
_PARTS = {"config": "option", "uses": "uses", "user_scripts": "user script"}


def explain(old: Action | None, new: Action) -> tuple[str, ...]:
    """The leaves of the action that differ, such as "option opt_level: 0 -> 1". Empty if the actions are the same."""
    if old is None:
        return ("first build",)
    before, after = dict(_leaves(old.content)), dict(_leaves(new.content))
    lines = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: [*map(str, path)]):
        if path not in before:
            lines.append(f"{_name(path)}: added, {_words(after[path])}")
        elif path not in after:
            lines.append(f"{_name(path)}: removed, was {_words(before[path])}")
        elif canonical_json(before[path]) != canonical_json(after[path]):  # in Python, 1 == 1.0 == True
            lines.append(f"{_name(path)}: {_words(before[path])} -> {_words(after[path])}")
    return tuple(lines)


def _leaves(value: Any, path: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Maps and lists of maps are walked; scalars, and lists of scalars, are leaves, as are empty maps."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _name(path: Leaf) -> str:
    """What a user calls the leaf."""
    match path:
        case ("pass", "name"):
            return "pass"
        case ("pass", "version"):
            return "version of the pass"
        case ("inputs", "loras", int(index), *rest):
            return " ".join(["lora", str(index + 1), _dotted(rest)]).strip()
        case ("inputs", "loras"):
            return "loras"
        case ("inputs", "model"):
            return "output of the step before"
        case ("inputs", "model", "architecture"):
            return "architecture"
        case ("inputs", "traced"):
            return "form of the trace"
        case ("format",):
            return "format of the key"
        case ("inputs", "checkpoint" | "model", *rest):
            return f"checkpoint {_dotted(rest)}".strip()
        case ("config" | "uses" | "user_scripts" as part, *rest) if rest:
            return f"{_PARTS[part]} {_dotted(rest)}"
        case _:
            return _dotted(path) or "the action"


def _dotted(parts: Any) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in parts)


def _words(value: Any) -> str:
    if not isinstance(value, str):
        return canonical_json(value).decode()
    if _DIGEST.fullmatch(value):
        return value[:12]
    return value if value and value.isprintable() else repr(value)
