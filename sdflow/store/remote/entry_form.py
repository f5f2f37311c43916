"""The fields of a remote entry that are read, as pydantic checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdflow.errors import first_problem
from sdflow.store.records import BadRecord

_Number = Annotated[float, Field(ge=0, lt=2**63)]
"""What can be reckoned with: an integer of JSON may have thousands of digits."""


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Size(_Form):
    bytes: _Number


class _Facts(_Form):
    operators: dict[str, _Number] = {}
    dtypes: dict[str, _Size] = {}


class _Built(_Form):
    seconds: _Number
    peak_memory: _Number
    finished: str


class _Entry(_Form):
    """What is read of an entry; it may hold more."""

    action: dict[str, Any]
    object: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    facts: _Facts
    built: _Built


def require_entry(fields: Mapping[str, Any]) -> None:
    """Raises BadRecord for an entry with a missing or malformed field."""
    try:
        _Entry.model_validate(fields)
    except ValidationError as error:
        raise BadRecord(first_problem(error)) from error
