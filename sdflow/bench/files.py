"""Write a run's files: bench.json, bench.csv, bench.md, bench.html."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from sdflow.bench.html import page
from sdflow.bench.result import BenchResult, EngineResult, Measurement
from sdflow.bench.table import TABLE, about, table
from sdflow.bench.timing import STAGES
from sdflow.disk.atomic_write import write_whole
from sdflow.errors import os_errors_as

# Columns of onnxruntime.transformers.models.stable_diffusion.benchmark, in its order and units: seconds, MB.
THEIR_COLUMNS = (
    "model_name", "directory", "engine", "version", "provider", "disable_safety_checker", "height", "width", "steps",
    "batch_size", "batch_count", "num_prompts", "average_latency", "median_latency", "first_run_memory_MB",
    "second_run_memory_MB", "enable_cuda_graph",
)  # fmt: skip

_LATENCIES = ("mean_ms", "median_ms", "p90_ms", "p99_ms")
_STAGE_COLUMNS = tuple(f"{stage}_{name}" for stage in STAGES for name in _LATENCIES)
COLUMNS = (
    *THEIR_COLUMNS, "status", "verdict", "reason", "dtype", "note", "p90_latency", "p99_latency", "min_latency", "runs",
    "images_per_second", "ratio", "baseline", "first_run_s", "compile_s", "load_s", *_STAGE_COLUMNS, "host_MB",
    "host_peak_MB", "device_MB", "device_peak_MB", "process_device_peak_MB", "energy_J", "distance", "psnr_dB",
    "tolerance", "tolerance_source", "accelerator", "processor",
)  # fmt: skip
"""Times of whole calls are in seconds, of stages in milliseconds. device_MB, host_MB: added by the engine."""


def write_files(result: BenchResult, out: Path) -> list[Path]:
    """Write all four files, each atomically. Raises UsageError if that fails."""
    contents = {
        "bench.json": json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n",
        "bench.csv": to_csv(result),
        "bench.md": to_markdown(result),
        "bench.html": page(result),
    }
    for name, text in contents.items():
        with os_errors_as("cannot be written", out / name, "Name --out DIR."):
            write_whole(out / name, text.encode())
    return [out / name for name in contents]


def to_csv(result: BenchResult) -> str:
    """A line per engine and case; one for an engine that did not run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    for engine in result.engines:
        for index, found in enumerate(engine.cases or (None,) * len(result.cases)):
            row = {**_about(result, engine, index), **(_figures(result, engine, index, found) if found else {})}
            writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _about(result: BenchResult, engine: EngineResult, index: int) -> dict[str, Any]:
    case = result.cases[index]
    runtime = "onnxruntime" if engine.name.startswith("ort-") else "torch"
    version = next((value for name, value in result.versions.items() if name.startswith(runtime)), None)
    found = engine.cases[index] if engine.cases else None
    return {
        "model_name": result.pipeline["model"],
        "directory": result.pipeline["folder"],
        "engine": engine.name,
        "version": version,
        "provider": engine.provider,
        "disable_safety_checker": True,
        "height": case.height,
        "width": case.width,
        "steps": case.steps,
        "batch_size": case.batch,
        "status": engine.status if found is None else "measured",
        "verdict": "" if found is None else found.verdict,
        "reason": engine.reason if found is None else "",
        "dtype": engine.dtype,
        "note": engine.note,
        "accelerator": result.machine.get("accelerator"),
        "processor": result.machine.get("processor"),
    }


def _figures(result: BenchResult, engine: EngineResult, index: int, found: Measurement) -> dict[str, Any]:
    image, check, baseline = found.image, found.check, result.baseline(index)
    on_device = found.memory.device is not None
    first, second = (memory.device if on_device else memory.host for memory in (found.memory, found.memory_second))
    return {
        "batch_count": image.runs,
        "num_prompts": 1,
        "average_latency": image.mean_ms / 1e3,
        "median_latency": image.median_ms / 1e3,
        "first_run_memory_MB": _mb(first),
        "second_run_memory_MB": _mb(second),
        "enable_cuda_graph": result.settings["device"] == "cuda" and engine.provider.startswith("CUDA"),
        "p90_latency": image.p90_ms / 1e3,
        "p99_latency": image.p99_ms / 1e3,
        "min_latency": image.min_ms / 1e3,
        "runs": image.runs,
        "images_per_second": found.images_per_second,
        "ratio": result.ratio(engine, index),
        "baseline": baseline.name if baseline else "",
        "first_run_s": found.first_ms / 1e3,
        "compile_s": found.compile_ms / 1e3,
        "load_s": engine.load_seconds,
        **{f"{stage}_{name}": getattr(latency, name) for stage, latency in found.stages.items() for name in _LATENCIES},
        "host_MB": _mb(engine.host_bytes),
        "host_peak_MB": _mb(found.memory.host),
        "device_MB": _mb(engine.device_bytes),
        "device_peak_MB": _mb(found.memory.device),
        "process_device_peak_MB": _mb(found.memory.process),
        "energy_J": found.energy,
        **(
            {
                "distance": check.distance,
                "psnr_dB": check.psnr,
                "tolerance": check.tolerance,
                "tolerance_source": check.source,
            }
            if check
            else {}
        ),
    }


def _mb(value: int | None) -> float | None:
    return None if value is None else value / 1e6


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_markdown(result: BenchResult) -> str:
    """A table per case, the engines that did not run, and the scope of the figures."""
    lines = [f"# {result.pipeline['name']}: engines side by side", ""]
    if result.wrong:
        lines += [f"**WRONG images:** {', '.join(result.wrong)}.", ""]
    for index, case in enumerate(result.cases):
        baseline = result.baseline(index)
        ratio = f"ratio to {baseline.name}" if baseline else "no ratios: no baseline ran"
        lines += [f"## {case}", "", f"Milliseconds per call; {ratio}.", ""]
        rows = list(table(result, index))
        lines += [_row(TABLE), _row(["---"] * len(TABLE)), *(_row(row) for row in rows), ""]
    lines += [f"- {each.name}: {each.status}: {each.reason}" for each in result.engines if each.reason]
    lines += ["", *(f"- {name}: {value}" for name, value in about(result)), ""]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
