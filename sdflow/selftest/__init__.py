"""Test whether this hardware generates the sample pipeline's images like PyTorch on the CPU.

Builds the sample for a target, runs it there in separate processes, compares its images with PyTorch's in float32,
times it, and names nodes on other providers. The `Report` (`sdflow.selftest.result`) contains no personal data; a
missing or broken target is a report, too.
"""

from __future__ import annotations

import base64
import io
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.bench.evaluate import EvaluationResult, evaluate
from sdflow.build.listener import Listener
from sdflow.config import load_workflow
from sdflow.config.workflow import EvaluateSpec, ImageSpec, LatencySpec
from sdflow.disk.locked_folder import scratch_folder
from sdflow.disk.shipped import sample_folder, shipped_workflow
from sdflow.distance import largest_difference, psnr, ssim
from sdflow.errors import SdflowError, TargetUnavailableError, UsageError
from sdflow.machine.device import device
from sdflow.machine.packages import versions
from sdflow.machine.providers import require_package
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.passes.registry import catalog
from sdflow.processes.workers import run_worker
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.runtime.sessions.availability import Availability, target_availability
from sdflow.selftest.private import Private
from sdflow.selftest.result import DrawnPair, Ran, Report, Verdict
from sdflow.store import Cache
from sdflow.targets import TARGETS, find_target
from sdflow.tolerances import IMAGE_DECIBELS

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MODEL", "Report", "selftest"]

MODEL = "sample:shapes"
WORKFLOW = "base/shapes.yaml"
WORKER = "sdflow.selftest.worker"
RUNS = LatencySpec(warmup=1, runs=5)
STEPS, EMULATED_STEPS = 20, 2
SIZE, EMULATED_SIZE = 128, 64
"""On a GPU that the processor emulates, a step at 64x64 pixels takes 10 s and more of processor time."""
EMULATED_NOTE = (
    f"emulated GPU: one image of {EMULATED_SIZE}x{EMULATED_SIZE} pixels and {EMULATED_STEPS} steps, and no times"
)


def selftest(
    target: str | None,
    cache: Cache,
    listener: Listener,
    *,
    pipeline: Path | None = None,
    engine_cache: Path | None = None,
) -> Report:
    """Build, run, compare, and time.

    target: None: the pipeline's, or the CPU. pipeline: a folder of the sample built elsewhere, instead of building it.
    engine_cache: folder for the provider's compiled engines.
    Raises UsageError for a target or folder that cannot be tested, CheckpointError if the sample is not installed;
    later failures are in the report.
    """
    if pipeline is not None:
        origin = read_manifest(pipeline).origin
        if origin.model != MODEL or origin.loras:
            raise UsageError(
                "this is not the sample pipeline, the only one with known images",
                where=str(pipeline / MANIFEST_FILE),
                remedy=f"Build it where you can: sdflow run of a workflow that extends {WORKFLOW}, with --copy.",
            )
        target = target or origin.target
    sample_folder(MODEL.partition(":")[2])
    target = find_target(target or "cpu", "--target").name
    # Omit the kernel version, into which distributions and users may put names.
    machine = {**device(TARGETS[target]), "system": f"{platform.system()} {platform.machine()}"}
    report = Report(target=target, versions=versions(), device=machine)
    draft = _Draft(report)
    with scratch_folder("selftest") as scratch, draft.failures():
        here = _require_here(target, listener)
        emulated = here.emulated
        if here.accelerator is not None and machine["accelerator"] is None:
            draft.report = replace(draft.report, device={**machine, "accelerator": here.accelerator})
        steps, size = (EMULATED_STEPS, EMULATED_SIZE) if emulated else (STEPS, SIZE)
        listener.note(f"{target}: compared with PyTorch in float32 on the CPU")
        reference = _drawn(scratch, None, target, (steps, size), listener)
        if pipeline is None:
            begin = time.perf_counter()
            pipeline = _built(scratch, target, cache, listener)
            draft.report = replace(draft.report, build_seconds=time.perf_counter() - begin)
        # On an emulated GPU, sessions are only made, to see where their nodes are.
        image = None if emulated else ImageSpec(steps=steps, height=size, width=size)
        spec = EvaluateSpec(latency=None if emulated else RUNS, image=image, allow_fallback=True)
        measured = evaluate(
            pipeline,
            spec,
            target,
            name="sample",
            required=True,
            engine_cache=engine_cache,
            progress=lambda phrase: listener.doing("measure", phrase),
        )
        listener.doing("measure", "")
        draft.report = _with_times(draft.report, measured)
        if emulated:
            draft.report = replace(draft.report, steps=steps, notes=(*draft.report.notes, EMULATED_NOTE))
        drawn = _drawn(scratch, pipeline, target, (steps, size), listener, engine_cache)
        draft.report = judged(draft.report, reference, drawn)
    return Private.here().cleared(draft.report)


def _require_here(target: str, listener: Listener) -> Availability:
    """Return what runs the target here. Raises TargetUnavailableError, before the sample is built, if a tiny model does
    not run on the target."""
    require_package(TARGETS[target])
    if target == "cpu":
        return Availability(target, True)
    listener.note(f"{target}: checking whether it runs here")
    (found,) = target_availability((target,))
    if not found.available:
        raise TargetUnavailableError(found.reason or "does not run here", where=target, remedy=found.remedy)
    if found.emulated:
        listener.note(f"{target}: {EMULATED_NOTE}")
    return found


@dataclass
class _Draft:
    """The report under construction. A failure becomes its verdict."""

    report: Report

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except TargetUnavailableError as error:
            self._end("unavailable", error)
        except SdflowError as error:
            self._end("broken", error)

    def _end(self, verdict: Verdict, error: SdflowError) -> None:
        self.report = replace(self.report, verdict=verdict, reason=str(error))


def _built(scratch: Path, target: str, cache: Cache, listener: Listener) -> Path:
    workflow = shipped_workflow(WORKFLOW)
    if workflow is None:
        raise UsageError(f"{WORKFLOW} is not installed", remedy="Install sdflow again.")
    loaded = load_workflow(workflow, catalog=catalog(), targets=(target,))
    options = RunOptions(
        out=scratch / "pipelines", results=scratch / "results", copy=True, verify=False, evaluate=False
    )
    return run_workflow(loaded, cache, options, listener).pipelines[0].folder


def _drawn(
    scratch: Path,
    folder: Path | None,
    target: str,
    extent: tuple[int, int],
    listener: Listener,
    engine_cache: Path | None = None,
) -> list[dict[str, Any]]:
    """The images generated by a folder on a target, or by PyTorch on the CPU, each with its content. extent: steps, and
    pixels per side."""
    steps, size = extent
    request = {
        "folder": str(folder.absolute()) if folder else None,
        "target": target,
        "steps": steps,
        "size": size,
        "images": 1 if steps == EMULATED_STEPS else 2,
        "engine_cache": str(engine_cache.absolute()) if engine_cache else None,
    }
    what = "PyTorch" if folder is None else target
    done = run_worker(WORKER, request, log=scratch / "log.txt", on_phase=lambda phrase: listener.doing(what, phrase))
    listener.doing(what, "")
    return list(done.value)


def _with_times(report: Report, measured: EvaluationResult) -> Report:
    parts = {
        name: Ran(
            nodes=dict(part.placement.nodes),
            shapes_on_cpu=part.placement.shapes_on_cpu,
            fallen=tuple((node.name, node.op_type, node.provider) for node in part.placement.fallen),
            inputs=dict(part.inputs),
            load_seconds=part.load_seconds,
            median_ms=part.latency.median_ms if part.latency else None,
        )
        for name, part in measured.submodels.items()
    }
    steps, image = measured.settings["steps"], measured.pipeline
    return replace(
        report,
        provider=measured.provider,
        submodels=parts,
        steps=steps,
        image_ms=image.median_ms if image else None,
        first_image_ms=image.first_ms if image else None,
        peak_memory_bytes=measured.peak_memory_bytes,
        notes=measured.notes,
    )


def judged(report: Report, reference: list[dict[str, Any]], drawn: list[dict[str, Any]]) -> Report:
    """Add images and verdict to the report.

    Passed: each image is as close to PyTorch's as `sdflow verify` requires of images, or, only in float16, shows the
    same shape in the same colour, since rounding may divert a trajectory. Nodes on another provider always fail it.
    """
    half = any("float16" in shape for part in report.submodels.values() for shape in part.inputs.values())
    limit = IMAGE_DECIBELS["float16" if half else "float32"]
    pairs = []
    for mine, other in zip(drawn, reference, strict=True):
        image, wanted = _array(mine["png"]), _array(other["png"])
        pairs.append(
            DrawnPair(
                prompt=mine["prompt"],
                seed=mine["seed"],
                decibels=min(psnr(image, wanted), 200.0),
                ssim=ssim(image, wanted),
                largest=largest_difference(image, wanted),
                shows=mine["shows"],
                shown_by_pytorch=other["shows"],
                png=mine["png"],
                pytorch_png=other["png"],
            )
        )
    wrong = [
        pair
        for pair in pairs
        if pair.decibels < limit and not (half and pair.shows and pair.shows == pair.shown_by_pytorch)
    ]
    fallen = {name: len(part.fallen) for name, part in report.submodels.items() if part.fallen}
    reasons = [
        f"{pair.prompt!r} is {pair.decibels:.1f} dB from PyTorch's image; {limit:.0f} are required" for pair in wrong
    ]
    reasons += [f"{name}: {count} nodes do not run on {report.provider}" for name, count in fallen.items()]
    verdict: Verdict = "failed" if reasons else "passed"
    return replace(report, images=tuple(pairs), verdict=verdict, reason="; ".join(reasons) or None)


def _array(png: str) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        return np.asarray(image.convert("RGB"), np.float32) / 255


def png_of(image: Image) -> str:
    """Only the pixels, as PNG in base64, without text chunks."""
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
