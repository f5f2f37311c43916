"""Validate a YAML tree against a pydantic model and report every problem at its place in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, describe, to_data
from sdflow.config.workflow import Mark

M = TypeVar("M", bound=BaseModel)
_TYPES = ("tuple_type", "set_type", "frozen_set_type", "is_instance_of")
_WORDS = {"a valid string": "text", "a valid array": "a list", "an object": "a map", "a valid dictionary": "a map"}


def check(
    model: type[M], node: YamlMap, what: str, problems: Problems, *, known: Collection[str] = (), partial: bool = False
) -> M | None:
    """Return the tree as an instance of the model, or None with problems.

    Types are strict: the text "no" is not a boolean and "3" is not a number. what: the map's name in messages.
    known: other allowed keys, for suggestions. partial: required fields may be missing.
    """
    data = to_data(node)
    try:
        # Validated as JSON: only then does strict mode accept a list for a tuple, and text for a path or an enum.
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    # Below a Mapping or a custom validator, pydantic forgets that the input was JSON.
    remaining = [error for error in errors if not (error["type"] in _TYPES and isinstance(error["input"], (list, str)))]
    if len(remaining) < len(errors):
        try:
            checked = model.model_validate(data)
            if not remaining:
                return checked
        except ValidationError as failure:
            remaining += failure.errors(include_url=False)
    for place, message, remedy in _complaints(model, node, remaining, known, partial):
        problems.add(place, f"{what}: {message}", remedy)
    return None


def _complaints(
    model: type[BaseModel], node: YamlMap, errors: Sequence[ErrorDetails], known: Collection[str], partial: bool
) -> list[tuple[Mark, str, str | None]]:
    found: list[tuple[Mark, str, str | None]] = []
    values: dict[str, tuple[Node, list[str], list[str]]] = {}
    for error in errors:
        path, value, keys = _follow(node, error["loc"] or _blamed(node, error["msg"]))
        if error["type"] == "missing":
            if not partial:
                found.append((value.mark, f"{'.'.join([*path, str(error['loc'][-1])])!r} is required", None))
        elif error["type"] == "extra_forbidden":
            name = str(error["loc"][-1])
            names = [*_field_names(model, path[:-1]), *(known if len(path) == 1 else ())]
            found.append((keys[-1] if keys else value.mark, f"unknown option {name!r}", nearest(name, names)))
        elif path or not partial:
            phrase = _phrase(error["msg"])
            _, phrases, expected = values.setdefault(".".join(path), (value, [], []))
            if phrase not in phrases:
                phrases.append(phrase)
            expected.extend(re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", ""))))
    for dotted, (value, phrases, expected) in values.items():
        subject = f"{dotted!r} " if dotted else ""
        remedy = nearest(str(to_data(value)), expected) if expected else _remedy(value, phrases)
        found.append((value.mark, f"{subject}{' or '.join(phrases)}, found {describe(value)}", remedy))
    return found


def _follow(node: Node, loc: tuple[int | str, ...]) -> tuple[list[str], Node, list[Mark]]:
    """The keys, the value and the places of the keys at pydantic's `loc`.

    A loc also names branches of unions and validators; these are skipped.
    """
    path: list[str] = []
    keys: list[Mark] = []
    for part in loc:
        if isinstance(node, YamlMap) and isinstance(part, str) and part in node.entries:
            keys.append(node.keys[part])
            node = node.entries[part]
        elif isinstance(node, YamlList) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            continue
        path.append(str(part))
    return path, node, keys


def _blamed(node: YamlMap, message: str) -> tuple[str, ...]:
    """The option that a model validator complains about, if its message begins with the option's name."""
    words = message.removeprefix("Value error, ").split(maxsplit=1)
    name = words[0].strip("`'\":,") if words else ""
    return (name,) if name in node.entries else ()


def _field_names(model: type[BaseModel], path: list[str]) -> list[str]:
    """The fields of the nested model at this path of keys, if there is one."""
    for key in path:
        field = model.model_fields.get(key)
        if field is None:
            return []
        inner = [kind for kind in _flat(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _flat(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    return [annotation, *(kind for argument in arguments for kind in _flat(argument))]


def _phrase(message: str) -> str:
    """Turn pydantic's message into the end of a sentence: "must be a valid integer"."""
    for prefix in ("Value error, ", "Assertion failed, "):
        if message.startswith(prefix):
            return f"is invalid: {message.removeprefix(prefix)}"
    if message.startswith("Input should be "):
        kind = message.removeprefix("Input should be ")
        return f"must be {_WORDS.get(kind, kind)}"
    return message[:1].lower() + message[1:]


def _remedy(value: Node, phrases: list[str]) -> str | None:
    data = to_data(value)
    if any("boolean" in phrase for phrase in phrases) and str(data).lower() in ("yes", "no", "on", "off"):
        return "write true or false"
    if any("must be text" in phrase for phrase in phrases) and isinstance(data, (bool, int, float)):
        return "put it in quotes"
    return None
