"""JSON Schemas of sdflow's output: of `sdflow run --json`, and of locks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from sdflow.bench.evaluate import EvaluationResult
from sdflow.build.lock_content import Lock
from sdflow.errors import UsageError
from sdflow.verify import Verification

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class _Document(BaseModel):
    """A document to which keys may be added."""

    model_config = ConfigDict(extra="allow")


class Built(_Document):
    """How a step was built, whenever that was."""

    finished: str
    seconds: float
    peak_memory: Annotated[int, Field(description="Bytes.")]


class StepDocument(_Document):
    """A step of a pipeline."""

    step: Annotated[str, Field(description="PIPELINE/SUBMODEL/INDEX")]
    pass_name: Annotated[str, Field(alias="pass")]
    outcome: Annotated[str, Field(description="cached, fetched, built or checked.")]
    action: Annotated[Digest, Field(description="The step's cache key.")]
    artifact: Annotated[Digest, Field(description="Digest of the step's result.")]
    bytes: int
    built: Built
    facts: Annotated[Mapping[str, Any], Field(description="Measurements of the pass on its output.")]


class PipelineDocument(_Document):
    """A built pipeline."""

    name: str
    target: str
    folder: str
    seconds: float
    notes: list[str]
    steps: list[StepDocument]
    verification: Verification | None
    evaluation: EvaluationResult | None


class RunDocument(_Document):
    """The result of a run."""

    format_version: Literal[1]
    kind: Literal["run"]
    seconds: float
    pipelines: list[PipelineDocument]


class ProblemDocument(_Document):
    """A mistake in a workflow. Line 0 means that the place is unknown."""

    file: str
    line: int
    column: int
    message: str
    remedy: str | None


class ErrorDocument(_Document):
    """Why a run failed."""

    format_version: Literal[1]
    kind: Literal["error"]
    where: str | None
    what: str
    remedy: str | None
    exit_status: int
    problems: Annotated[list[ProblemDocument], Field(description="Mistakes of an invalid workflow.")] = []


def run_schema() -> dict[str, Any]:
    """The schema of the document that `sdflow run --json` prints, including on failure."""
    schema = TypeAdapter(RunDocument | ErrorDocument).json_schema(by_alias=True)
    title = "What `sdflow run --json` prints"
    return {"$schema": DRAFT, "title": title, **{key: _with_infinity(each) for key, each in schema.items()}}


def lock_schema() -> dict[str, Any]:
    """The schema of `WORKFLOW.lock`."""
    return {"$schema": DRAFT, **Lock.model_json_schema()}


SCHEMAS = {"run": run_schema, "lock": lock_schema}


def schema_named(name: str) -> dict[str, Any]:
    """The schema of this name. Raises UsageError if there is none."""
    if name not in SCHEMAS:
        raise UsageError(f"there is no schema {name!r:.60}", where="schema", remedy="Known: workflow, run, lock.")
    return SCHEMAS[name]()


def _with_infinity(schema: Any) -> Any:
    """Allow the text "inf" for numbers, since JSON has no infinity."""
    if isinstance(schema, list):
        return [_with_infinity(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {
            **{key: each for key, each in schema.items() if key != "type"},
            "anyOf": [{"type": "number"}, {"const": "inf"}],
        }
    return {key: _with_infinity(each) for key, each in schema.items()}
