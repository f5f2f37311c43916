"""Dataclasses as plain JSON, for the process that verifies, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

Kind = TypeVar("Kind")


def as_json(value: object) -> Any:
    """JSON of a dataclass, in which paths are texts."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[Kind], value: Any) -> Kind:
    """What `as_json` was given. Raises ValueError for JSON of something else."""
    return TypeAdapter(kind).validate_python(value)
