"""What an evaluation found: plain data, JSON, and the lines of `results/`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdflow.errors import VerificationError
from sdflow.evaluate.statistics import Latency
from sdflow.runtime.sessions.placement import PlacedNode, Placement

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SubmodelResult:
    """One submodel. inputs: name -> shape and type of what it was timed with, e.g. "2x4x64x64 float16".

    load_seconds: from the file to a session that is ready, the provider's own compilation included.
    """

    inputs: Mapping[str, str]
    load_seconds: float
    placement: Placement
    latency: Latency | None


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluated pipeline; `measured` is false, with `reason`, when its target is not on this machine.

    settings: of the image that was drawn and timed: prompt, steps, guidance_scale, seed, height and width in pixels,
        denoiser_batch.
    pipeline: one whole image, from the prompt to pixels, safety checker included.
    peak_memory_bytes: of the process that did it all, everything loaded at once; host memory.
    failure: why the result does not pass, although it was measured. notes: what the runtime could not do as it should:
        run captured, or in kernels of its own.
    """

    name: str
    target: str
    measured: bool
    reason: str | None = None
    provider: str | None = None
    submodels: Mapping[str, SubmodelResult] = field(default_factory=dict)
    pipeline: Latency | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    image: str | None = None
    nsfw_content_detected: bool | None = None
    peak_memory_bytes: int | None = None
    artifacts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    time: str | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()

    def raise_for_failure(self) -> None:
        """Raises VerificationError when the result does not pass."""
        if self.failure is not None:
            raise VerificationError(self.failure)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with its `format_version`."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EvaluationResult:
        """The result that `to_json` wrote. Raises ValueError for another format."""
        content = dict(value)
        if content.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError("not an evaluation result of a known format")
        content["submodels"] = {name: _submodel(part) for name, part in content["submodels"].items()}
        content["pipeline"] = _latency(content["pipeline"])
        content["notes"] = tuple(content.get("notes", ()))
        return cls(**content)


def append_result(path: Path, result: EvaluationResult) -> None:
    """Add the result as one line of JSON; lines of processes that write at once do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _submodel(value: Mapping[str, Any]) -> SubmodelResult:
    placed = dict(value["placement"])
    placed["fallen"] = tuple(PlacedNode(**node) for node in placed["fallen"])
    return SubmodelResult(value["inputs"], value["load_seconds"], Placement(**placed), _latency(value["latency"]))


def _latency(value: Mapping[str, Any] | None) -> Latency | None:
    return None if value is None else Latency(**value)
