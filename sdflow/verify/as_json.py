"""Convert dataclasses to plain JSON, for the verifying process, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

Kind = TypeVar("Kind")


def as_json(value: object) -> Any:
    """The JSON of a dataclass; paths become strings."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[Kind], value: Any) -> Kind:
    """The dataclass from `as_json`'s result. Raises ValueError for other JSON."""
    return TypeAdapter(kind).validate_python(value)
