"""The result of a self-test: plain data, its JSON, and reading untrusted ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from sdflow.disk.input_file import read_json
from sdflow.errors import UsageError

KIND, FORMAT_VERSION = "selftest", 1
MOST_BYTES = 16 << 20
MOST_PIXELS = 1 << 20
"""Maximum characters of an image in base64: the sample's have some 20,000."""

Verdict = Literal["passed", "failed", "unavailable", "broken"]
"""passed, failed: it ran. unavailable: the target is missing here. broken: it could not be built, or did not run."""


_CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _png(text: str) -> str:
    if not base64.b64decode(text, validate=True).startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("is not a PNG")
    return text


Png = Annotated[str, Field(max_length=MOST_PIXELS), AfterValidator(_png)]
"""Pixels in base64."""


@dataclass(frozen=True)
class Ran:
    """A submodel on the target. nodes: provider -> number. fallen: name, operator and provider of nodes that should run
    on the target's and do not. inputs: name -> shape and type. median_ms: of one run, including copies."""

    __pydantic_config__ = _CHECKED
    nodes: Mapping[str, int]
    shapes_on_cpu: int
    fallen: tuple[tuple[str, str, str], ...]
    inputs: Mapping[str, str]
    load_seconds: float
    median_ms: float | None


@dataclass(frozen=True)
class DrawnPair:
    """An image by the target and PyTorch's from the same latents. decibels: PSNR, 200 if they are equal. shows: whether
    shape and colour match the prompt. png: pixels in base64."""

    __pydantic_config__ = _CHECKED
    prompt: str
    seed: int
    decibels: float
    ssim: float
    largest: float
    shows: bool
    shown_by_pytorch: bool
    png: Png
    pytorch_png: Png


@dataclass(frozen=True)
class Report:
    """A whole report. reason: why it did not pass. device: processor, cores, memory, system, accelerator."""

    __pydantic_config__ = _CHECKED
    target: str
    verdict: Verdict = "broken"
    reason: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, str | int | float | None] = field(default_factory=dict)
    provider: str | None = None
    submodels: Mapping[str, Ran] = field(default_factory=dict)
    steps: int | None = None
    build_seconds: float | None = None
    first_image_ms: float | None = None
    image_ms: float | None = None
    peak_memory_bytes: int | None = None
    images: tuple[DrawnPair, ...] = ()
    notes: tuple[str, ...] = ()


_REPORT = TypeAdapter(Report)


def to_json(report: Report) -> dict[str, Any]:
    """Plain JSON, with lists for tuples."""
    plain: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return plain


def from_json(content: Mapping[str, Any]) -> Report:
    """Parse a report's JSON. Raises ValueError with the place and problem for anything else."""
    try:
        return _REPORT.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:400]) from error


def document(report: Report) -> bytes:
    """The JSON file of a report."""
    content = {"kind": KIND, "format_version": FORMAT_VERSION, **to_json(report)}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_report(path: Path) -> Report:
    """Read a file from `sdflow selftest --report`. Raises UsageError for any other."""
    remedy = "Name a .json file from `sdflow selftest --report`."
    try:
        content = read_json(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"is damaged, or not JSON: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(content, dict) or content.pop("kind", None) != KIND:
        raise UsageError("is not a self-test report", where=str(path), remedy=remedy)
    if (version := content.pop("format_version", None)) != FORMAT_VERSION:
        raise UsageError(
            f"has the format {version!r}, but this sdflow reads {FORMAT_VERSION}",
            where=str(path),
            remedy="Use the sdflow that wrote it.",
        )
    try:
        return from_json(content)
    except ValueError as error:
        raise UsageError(f"is damaged: {error}", where=str(path), remedy=remedy) from error
