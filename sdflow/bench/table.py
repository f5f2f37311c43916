"""A run as a table, for the terminal, bench.md and bench.html: a row per engine, and the figures' scope."""

from __future__ import annotations

from collections.abc import Iterator

from sdflow.bench.latency import Latency
from sdflow.bench.result import BenchResult, EngineResult, Measurement
from sdflow.bench.timing import STAGES

TABLE = (
    "engine", "type", "median", "mean", "p90", "p99", "images/s", "ratio", "text", "step", "decoder", "first",
    "load s", "memory MB", "energy J", "distance", "image",
)  # fmt: skip
_UNITS = {
    **dict.fromkeys(("median", "mean", "p90", "p99", "text", "step", "decoder", "first"), "ms"),
    "distance": "rel. L2",
}
HEADS = tuple(f"{name} {_UNITS[name]}" if name in _UNITS else name for name in TABLE)
"""The columns of `TABLE` with their units."""
SHORT = ("engine", "type", "median ms", "of fastest", "images/s", "memory MB", "image")
TEXTS = ("engine", "type", "image")
"""The columns with text."""


def table(result: BenchResult, index: int) -> Iterator[list[str]]:
    """A row of `TABLE` for every engine measured in this case, fastest first.

    memory: added by the engine, on the device if there is one, otherwise on the host.
    """
    for engine, measured in by_median(result, index):
        image, check, ratio = measured.image, measured.check, result.ratio(engine, index)
        yield [
            engine.name,
            engine.dtype,
            *(_spelled(value) for value in (image.median_ms, image.mean_ms, image.p90_ms, image.p99_ms)),
            f"{measured.images_per_second:.3g}",
            "" if ratio is None else f"{ratio:.3f}",
            *(_median(measured.stages.get(stage)) for stage in STAGES),
            _spelled(measured.first_ms),
            "" if engine.load_seconds is None else f"{engine.load_seconds:.2f}",
            _megabytes(engine),
            "" if measured.energy is None else f"{measured.energy:.3g}",
            "" if check is None else f"{check.distance:.1e}",
            measured.verdict,
        ]


def short_table(result: BenchResult, index: int) -> Iterator[list[str]]:
    """The same for `SHORT`, the summary."""
    found = by_median(result, index)
    for engine, measured in found:
        median = measured.image.median_ms
        yield [
            engine.name,
            engine.dtype,
            f"{median:.4g}" if median < 1000 else f"{median:.0f}",
            f"{median / found[0][1].image.median_ms:.2f}x",
            f"{measured.images_per_second:.3g}",
            _megabytes(engine),
            measured.verdict,
        ]


def by_median(result: BenchResult, index: int) -> list[tuple[EngineResult, Measurement]]:
    """The engines measured in a case, fastest first."""
    found = [(each, measured) for each in result.measured if (measured := each.cases[index]) is not None]
    return sorted(found, key=lambda pair: pair[1].image.median_ms)


def about(result: BenchResult) -> Iterator[tuple[str, str]]:
    """The figures' scope, as lines."""
    yield "device", ", ".join(f"{name} {value}" for name, value in result.machine.items() if value is not None)
    yield "versions", ", ".join(f"{name} {value}" for name, value in result.versions.items())
    shown = {name: value for name, value in result.settings.items() if name != "cases"}
    yield "settings", ", ".join(f"{name} {value!r}" for name, value in shown.items())
    tolerances = {
        (engine.dtype, str(case)): found.check
        for engine in result.measured
        for case, found in zip(result.cases, engine.cases, strict=True)
        if found is not None and found.check is not None and not found.approximates and not found.quantized
    }
    for (dtype, case), check in tolerances.items():
        yield f"tolerance of {dtype}, {case}", f"{check.tolerance:.2e}: {check.source}"
    yield from ((engine.name, engine.note) for engine in result.measured if engine.note)
    yield "measured", result.time


def _spelled(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _megabytes(engine: EngineResult) -> str:
    memory = engine.device_bytes if engine.device_bytes is not None else engine.host_bytes
    return "" if memory is None else f"{memory / 1e6:.0f}"


def _median(latency: Latency | None) -> str:
    return "" if latency is None else _spelled(latency.median_ms)
