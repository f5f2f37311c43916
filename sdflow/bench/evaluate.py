"""Evaluate an assembled pipeline on its target: node placement, speed, memory, and an image.

The last stage of `sdflow run`: a benchmark of one engine without image comparison, which `sdflow verify` has done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sdflow.bench.latency import Latency
from sdflow.config.workflow import EvaluateSpec
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import TargetUnavailableError, UsageError, VerificationError
from sdflow.machine.providers import require_package
from sdflow.processes.workers import run_worker
from sdflow.runtime.kernels.library import FOLDER_VARIABLE, kernel_folder
from sdflow.runtime.sessions.placement import Placement
from sdflow.targets import TARGETS

WORKER = "sdflow.bench.evaluate_worker"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Request:
    """An evaluation request. image: the PNG file to write, if the spec has an image. threads: of the CPU, None: all."""

    folder: Path
    name: str
    target: str
    spec: EvaluateSpec
    image: Path | None = None
    engine_cache: Path | None = None
    threads: int | None = None


REQUEST = TypeAdapter(Request)


@dataclass(frozen=True)
class SubmodelResult:
    """One submodel. inputs: name -> shape and type of the timed inputs, e.g. "2x4x64x64 float16".

    load_seconds: from the file to a ready session, including the provider's own compilation.
    """

    inputs: Mapping[str, str]
    load_seconds: float
    placement: Placement
    latency: Latency | None


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluated pipeline; `measured` is false, with `reason` and `remedy`, if its target is not available.

    settings: of the timed image: prompt, steps, guidance_scale, seed, height and width in pixels, denoiser_batch.
    pipeline: one whole image, from the prompt to pixels, including the safety checker. peak_memory_bytes: host memory
    of the process with everything loaded. failure: why the result fails although it was measured. notes: where and why
    the runtime used slower paths than intended.
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
        """Raises VerificationError if the result fails."""
        if self.failure is not None:
            raise VerificationError(self.failure)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with its `format_version`."""
        return {"format_version": FORMAT_VERSION, **_ADAPTER.dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EvaluationResult:
        """Read the output of `to_json`. Raises ValueError for another format."""
        content = dict(value)
        if content.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError("not an evaluation result of a known format")
        return _ADAPTER.validate_python(content)


_ADAPTER = TypeAdapter(EvaluationResult)


def append_result(path: Path, result: EvaluationResult) -> None:
    """Append the result as one line of JSON; concurrent writers' lines do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result.to_json(), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def evaluate(
    folder: Path,
    spec: EvaluateSpec,
    target: str,
    *,
    name: str | None = None,
    results: Path | None = None,
    required: bool = False,
    threads: int | None = None,
    engine_cache: Path | None = None,
    progress: Callable[[str], None] = lambda phrase: None,
) -> EvaluationResult:
    """Evaluate a pipeline folder in a new process.

    results: the folder for a new line in `<name>.jsonl` and for `<name>.png`.
    required: an unavailable target is an error; otherwise the result says so and nothing is recorded.
    engine_cache: folder for the provider's compiled engines. progress: called with a short phrase for each phase.
    Raises TargetUnavailableError if required; VerificationError if the provider cannot run a graph; PassError if the
    process dies. Nodes on other providers are the result's `failure`.
    """
    name = name or folder.name
    image = None if results is None else results / f"{name}.png"
    request = Request(
        folder=folder.absolute(),
        name=name,
        target=target,
        spec=spec,
        image=image.absolute() if image else None,
        engine_cache=engine_cache.absolute() if engine_cache else None,
        threads=threads,
    )
    try:
        require_package(TARGETS[target])
        result = _in_worker(request, progress)
    except TargetUnavailableError as error:
        if required:
            raise
        return EvaluationResult(name=name, target=target, measured=False, reason=error.what, remedy=error.remedy)
    if results is not None:
        append_result(results / f"{name}.jsonl", result)
    return result


def _in_worker(request: Request, progress: Callable[[str], None]) -> EvaluationResult:
    with scratch_folder("log") as folder:
        worker = run_worker(
            WORKER,
            REQUEST.dump_python(request, mode="json"),
            log=folder / "log.txt",
            environment=_kernels(),
            on_phase=progress,
        )
    return EvaluationResult.from_json(worker.value)


def _kernels() -> dict[str, str]:
    """Point the worker, which gets a temporary home, to this user's compiled kernels."""
    try:
        return {FOLDER_VARIABLE: str(kernel_folder().absolute())}
    except UsageError:
        return {}
