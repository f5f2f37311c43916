"""The result of a run: plain data and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sdflow.bench.device import Memory
from sdflow.bench.engines import BASELINES
from sdflow.bench.latency import Latency
from sdflow.bench.sweep import SweepPoint
from sdflow.disk.input_file import read_json
from sdflow.errors import UsageError

FORMAT_VERSION = 1
KIND = "bench"


@dataclass(frozen=True)
class Check:
    """An image compared with PyTorch's in float32. distance: relative L2 of the pixels. psnr: dB; None: no difference.

    tolerance: the largest right distance. source: of that figure.
    """

    distance: float
    psnr: float | None
    tolerance: float
    source: str

    @property
    def wrong(self) -> bool:
        return not self.distance <= self.tolerance


@dataclass(frozen=True)
class Measurement:
    """An engine in a case.

    first_ms: the first image of this case, including compilation and loading for its sizes; compile_ms: its excess over
    the median. image: of one call, `batch` images. stages: "text": from the call to the encoded prompt; "step": between
    the ends of steps, including the scheduler; "decoder": from the last step to pixels on the host. On a GPU stages
    have their own runs, which synchronize at every mark. images_per_second: batch over the median. memory,
    memory_second: the peak in the first and the second call. energy: joules per image.
    check: None without a reference. approximates: the engine whose image replaces PyTorch's as the reference; empty for
    an exact engine. quantized: the quantized types ("int8 in unet"); the distance from PyTorch's image is then reported
    without a verdict.
    """

    first_ms: float
    compile_ms: float
    image: Latency
    stages: Mapping[str, Latency]
    images_per_second: float
    memory: Memory
    memory_second: Memory
    energy: float | None
    check: Check | None
    approximates: str = ""
    quantized: str = ""

    @property
    def verdict(self) -> Literal["right", "WRONG", "not checked", "approximation", "quantized"]:
        if self.approximates:
            return "approximation"
        if self.quantized:
            return "quantized"
        if self.check is None:
            return "not checked"
        return "WRONG" if self.check.wrong else "right"


@dataclass(frozen=True)
class EngineResult:
    """The result of one engine.

    status: "failed" if it could not be loaded, or in at least one case; `reason` says why.

    provider: what computes. dtype: of weights and activations. load_seconds: until it could be called. host_bytes,
    device_bytes: memory added by loading it and generating its first image.
    cases: None where it failed. trace: the whole error of a failure.
    """

    name: str
    title: str
    status: Literal["measured", "skipped", "failed"]
    reason: str | None = None
    provider: str = ""
    dtype: str = ""
    note: str = ""
    load_seconds: float | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    cases: tuple[Measurement | None, ...] = ()
    trace: str | None = None


@dataclass(frozen=True)
class BenchResult:
    """A run. machine: device, driver. settings: of the engines, including the cases. pipeline: name, model, LoRAs,
    target, artifacts."""

    pipeline: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    cases: tuple[SweepPoint, ...]
    engines: tuple[EngineResult, ...]
    time: str
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def measured(self) -> list[EngineResult]:
        return [engine for engine in self.engines if any(engine.cases)]

    def baseline(self, index: int) -> EngineResult | None:
        """The baseline engine of this case's ratios, if it ran with the right image."""
        found = {engine.name: engine for engine in self.measured if engine.cases[index] is not None}
        for name in BASELINES:
            measurement = found[name].cases[index] if name in found else None
            if measurement is not None and measurement.verdict != "WRONG":
                return found[name]
        return None

    def ratio(self, engine: EngineResult, index: int) -> float | None:
        """Its median latency over the baseline's; below 1 is faster."""
        baseline, own = self.baseline(index), engine.cases[index]
        against = baseline.cases[index] if baseline is not None else None
        return own.image.median_ms / against.image.median_ms if own is not None and against is not None else None

    @property
    def wrong(self) -> list[str]:
        """`engine (case)` for each wrong image."""
        return [
            f"{engine.name} ({case})"
            for engine in self.measured
            for case, found in zip(self.cases, engine.cases, strict=True)
            if found is not None and found.verdict == "WRONG"
        ]

    def to_json(self) -> dict[str, Any]:
        content = _plain(asdict(self))
        for engine, described in zip(self.engines, content["engines"], strict=True):
            for index, found in enumerate(engine.cases):
                if found is not None:
                    described["cases"][index] |= {"verdict": found.verdict, "ratio": self.ratio(engine, index)}
        return {"format_version": FORMAT_VERSION, "kind": KIND, **content}


def read_result(path: Path) -> dict[str, Any]:
    """Read a run's JSON. Raises UsageError if it is something else."""
    try:
        content = read_json(path)
        found = (content["format_version"], content["kind"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"not a result of `sdflow bench`: {error}", where=str(path), remedy="It writes bench.json into --out DIR."
        ) from error
    if found != (FORMAT_VERSION, KIND):
        raise UsageError(
            f"a {found[1]} of format {found[0]}, not a {KIND} of format {FORMAT_VERSION}",
            where=str(path),
            remedy="Name a bench.json that this version of sdflow wrote.",
        )
    return dict(content)


def _plain(value: Any) -> Any:
    """Replace values that JSON lacks: a non-finite distance becomes a string."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
