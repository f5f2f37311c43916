"""Read `provenance.json` in a pipeline folder: an in-toto statement with SLSA's predicate.

It names every file of the folder by digest, including `sdflow.json`. `sdflow.run.provenance` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdflow.digest import inside
from sdflow.disk.input_file import read_json
from sdflow.errors import UsageError, first_problem
from sdflow.manifest.file import read_manifest

PROVENANCE_FILE = "provenance.json"
BUILD_TYPE = "urn:sdflow:build:1"
STATEMENT = "https://in-toto.io/Statement/v1"
SLSA = "https://slsa.dev/provenance/v1"
_RESTORE = "Delete it, then run the pipeline's workflow again to restore it."


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Descriptor(_Form):
    name: str
    uri: str = ""
    digest: dict[str, str] = {}
    annotations: dict[str, Any] = {}


class _Asked(_Form):
    pipeline: str
    target: str
    model: str
    workflow: str


class _Made(_Form):
    actions: dict[str, list[dict[Literal["pass", "action"], str]]]


class _Definition(_Form):
    build_type: Literal["urn:sdflow:build:1"] = Field(alias="buildType")
    asked: _Asked = Field(alias="externalParameters")
    made: _Made = Field(alias="internalParameters")
    dependencies: list[_Descriptor] = Field(alias="resolvedDependencies")


class _Builder(_Form):
    id: str
    version: dict[str, str]


class _Metadata(_Form):
    started: str = Field(alias="startedOn")
    finished: str = Field(alias="finishedOn")


class _Details(_Form):
    builder: _Builder
    metadata: _Metadata
    byproducts: list[_Descriptor]


class _Predicate(_Form):
    definition: _Definition = Field(alias="buildDefinition")
    details: _Details = Field(alias="runDetails")


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """The statement of a pipeline folder; None for one of an earlier sdflow, which has none.

    Raises UsageError if the file is not such a statement.
    """
    path = folder / PROVENANCE_FILE
    try:
        statement = read_json(path)
        if not isinstance(statement, dict) or statement.get("_type") != STATEMENT:
            raise ValueError(f"its _type is not {STATEMENT}")
        if statement.get("predicateType") != SLSA:
            raise ValueError(f"its predicateType is not {SLSA}")
        subjects_of(statement)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except ValueError as error:
        raise UsageError(f"is not an in-toto statement: {error}", where=str(path), remedy=_RESTORE) from error
    return statement


def require_provenance(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file and its statement. Raises UsageError if it is missing, or another program wrote it."""
    path = folder / PROVENANCE_FILE
    read_manifest(folder)  # reports a folder that is not a pipeline
    statement = read_provenance(folder)
    if statement is None:
        remedy = "An earlier sdflow built it: run its workflow again to write it."
        raise UsageError("the pipeline has no provenance", where=str(path), remedy=remedy)
    try:
        _Predicate.model_validate(statement.get("predicate"))
    except ValidationError as error:
        raise UsageError(
            f"was not written by sdflow: {first_problem(error)}", where=str(path), remedy=_RESTORE
        ) from error
    return path, statement


def subjects_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """File -> SHA-256. Raises ValueError if the subjects are invalid."""
    return dict(_subjects(statement.get("subject")))


def _subjects(subjects: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(subjects, list) or not subjects:
        raise ValueError("it names no subject")
    for each in subjects:
        name = each.get("name") if isinstance(each, dict) else None
        digests = each.get("digest") if isinstance(each, dict) else None
        if not isinstance(name, str) or not inside(name):
            raise ValueError(f"the subject {name!r:.60} is not a file in the folder")
        if not isinstance(digests, dict) or not isinstance(digests.get("sha256"), str):
            raise ValueError(f"the subject {name:.60} has no SHA-256")
        yield name, digests["sha256"]
