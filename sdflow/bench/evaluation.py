"""What an evaluation found: plain data, JSON, and the lines of `results/`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sdflow.bench.latency import Latency
from sdflow.errors import VerificationError
from sdflow.runtime.sessions.placement import Placement

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
    """An evaluated pipeline; `measured` is false, with `reason` and `remedy`, when its target is not on this machine.

    settings: of the image that was drawn and timed: prompt, steps, guidance_scale, seed, height and width in pixels,
        denoiser_batch.
    pipeline: one whole image, from the prompt to pixels, safety checker included.
    peak_memory_bytes: of the process that did it all, everything loaded at once; host memory.
    failure: why the result does not pass, although it was measured. notes: where the runtime used slower paths than
        intended, and why.
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
    remedy: str | None = None

    def raise_for_failure(self) -> None:
        """Raises VerificationError when the result does not pass."""
        if self.failure is not None:
            raise VerificationError(self.failure)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with its `format_version`."""
        return {"format_version": FORMAT_VERSION, **_ADAPTER.dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EvaluationResult:
        """The result that `to_json` wrote. Raises ValueError for another format."""
        content = dict(value)
        if content.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError("not an evaluation result of a known format")
        return _ADAPTER.validate_python(content)


_ADAPTER = TypeAdapter(EvaluationResult)


def append_result(path: Path, result: EvaluationResult) -> None:
    """Add the result as one line of JSON; lines of processes that write at once do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
