"""Drive a verification: keys, cache, and the process that does the work.

References and verifications are cache entries like steps: a pipeline is verified once, and all targets share a
reference. Failed verifications are never cached.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from sdflow import stop
from sdflow.artifact import Action, Record
from sdflow.config.workflow import VerifySpec
from sdflow.disk.file_stamp import Stamp, check_stamps, folder_stamps
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import CheckpointError, PassError, TargetUnavailableError, UsageError, os_errors_as
from sdflow.machine.packages import distribution_version
from sdflow.manifest import read_manifest
from sdflow.processes.worker_group import WorkerGroup
from sdflow.processes.workers import WorkerResult, run_worker
from sdflow.runtime.sessions.availability import target_availability
from sdflow.store import Cache
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.recipes import is_bound, structure_of
from sdflow.verify.as_json import as_json
from sdflow.verify.folder import FolderRequest, source_of
from sdflow.verify.keys import reference_action, tree_digest, verification_action
from sdflow.verify.reference import reference
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import Selection, select
from sdflow.verify.requests import Built, judge_request, wanted_of
from sdflow.verify.result import Verification
from sdflow.verify.subject import Subject

WORKER = "sdflow.verify.worker"
RESULT_FILE = "verification.json"
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment of the verifying process. glibc keeps freed memory: modules and graphs of gigabytes replace one another,
and fresh memory must be cleared page by page. Where memory is fresh, it comes in pages of 2 MB (glibc 2.35, Linux): a
float16 matrix of 38 M values was widened and multiplied in half the processor time. torch's waiting threads sleep: if
another process uses a core, spinning threads take the other one from the thread that they wait for (a small UNet's run:
6 s instead of 0.1)."""
CARRIED = "its passes carried the weights, so there are no recipes for their values before rounding"
GONE = "the cache no longer has the recipes of its weights; running its workflow again restores them"
Progress = Callable[[str], None]


def unheard(phrase: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Verified:
    """A verification with its images: file name -> PNG."""

    result: Verification
    images: Mapping[str, bytes]


class How(TypedDict, total=False):
    """Options of a verification. fresh: verify again despite a cached pass. threads: of ONNX Runtime; default: all
    cores.
    progress: receives each phase. group: the worker group that runs the process and ends with it. run_on: a target
    whose provider also runs the artifacts; repeated each time and never cached, since the cache cannot identify a
    device.
    memory: limit in bytes; None: this machine's."""

    fresh: bool
    threads: int | None
    progress: Progress
    group: WorkerGroup | None
    run_on: str | None
    memory: int | None


def verify_alone(
    subject: Subject, spec: VerifySpec, cache: Cache, *, submodels: Sequence[str] | None = None, **how: Unpack[How]
) -> Verified:
    """Verify a pipeline without its refiner; a cached pass is reused. submodels: only these.

    A failed verification is returned, not raised: see `Verification.raise_for_failure`.
    Raises CheckpointError if the reference cannot be loaded, PassError if a process dies, TargetUnavailableError if
    `run_on` is not available.
    """
    run_on = how.get("run_on")
    if run_on is not None:
        _require_here(run_on)
    started = time.perf_counter()
    folder_stamps = stamps_of_folder(subject.folder)  # before any digest of it is computed
    built = _built_part(subject, submodels, cache)
    selection = select(spec, subject.image, built.submodels, subject.checkpoint)
    with scratch_folder("verify") as scratch, cache.lease():
        request = judge_request(subject, spec, built, scratch, how.get("threads"), run_on)
        request = replace(request, memory=how.get("memory"))
        exact, worker = _reference(subject, selection, request, cache, how)
        action = verification_action(subject, spec, built, exact, cache) if exact is not None else None
        known = None
        if worker is None:
            assert exact is not None and action is not None
            request = replace(request, reference=exact.artifact.path.absolute())
            record = None if how.get("fresh") else cache.lookup(action)
            known = _as_kept(record, subject) if record is not None else None
            if known is not None and run_on is None:
                return known
            worker = _work(None, request, subject, how, known.result if known is not None else None)
        check_stamps(folder_stamps, "its verification began")
        result = Verification.from_json(worker.value["verification"])
        if known is None:
            versions = {name: distribution_version(name) for name in (*reference.USES, "onnx", "onnxruntime")}
            result = replace(result, artifacts=dict(built.digests), versions=versions)
        result = replace(result, seconds=round(time.perf_counter() - started, 1), cached=False)
        if not cache.writable:
            how.get("progress", unheard)("the cache is read-only: the result is not saved")
        elif result.passed and action is not None and run_on is None:
            (scratch / RESULT_FILE).write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
            keep(scratch, action, worker, cache)
        return Verified(result, image_files(scratch) if known is None else known.images)


def stamps_of_folder(folder: Path) -> list[Stamp]:
    try:
        return folder_stamps(folder)
    except OSError as error:  # such as a link to a removed cache entry
        raise UsageError(
            f"cannot be read: {error.strerror}", where=str(error.filename or folder), remedy="Run its workflow again."
        ) from error


def _built_part(subject: Subject, submodels: Sequence[str] | None, cache: Cache) -> Built:
    """The manifest's part to verify. Raises UsageError for a submodel that the pipeline lacks."""
    manifest = read_manifest(subject.folder)
    built = subject.checkpoint.family.ordered(manifest.parts)
    if unknown := sorted(set(submodels or ()) - set(built)):
        raise UsageError(f"the pipeline has no {unknown[0]}, only {', '.join(built)}", where=str(subject.folder))
    present = [name for name in built if submodels is None or name in submodels]
    chains = {name: manifest.origin.chains.get(name) for name in present}
    made_by = {name: structure_of(chain, cache.root) for name, chain in chains.items()}
    with os_errors_as(
        "cannot be read", subject.folder, "Run its workflow again.", of_many=True
    ):  # a link to a removed cache entry
        digests = {name: tree_digest(subject.folder / name, cache) for name in present}
    return Built(
        present,
        digests=digests,
        structures={name: path for name, path in made_by.items() if path is not None},
        unproved={name: GONE if is_bound(chains[name]) else CARRIED for name, path in made_by.items() if path is None},
        quantized={name: chain.quantized for name, chain in chains.items() if chain is not None and chain.quantized},
    )


def _require_here(target: str) -> None:
    """Raises TargetUnavailableError, with the reason, if the target does not run on this machine."""
    (found,) = target_availability([target])
    if not found.available:
        raise TargetUnavailableError(
            f"the artifacts cannot run there: {found.reason}",
            where=f"--run-on {target}",
            remedy=found.remedy or "Leave --run-on out: the artifacts are verified on the CPU alone.",
        )


def _as_kept(record: Record, subject: Subject) -> Verified:
    """A cached verification, renamed to the pipeline's current name."""
    folder = record.artifact.path
    stored = Verification.from_json(json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    return Verified(replace(stored, name=subject.name, cached=True), image_files(folder))


def _facts(worker: WorkerResult) -> dict[str, Any]:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"seconds": round(worker.seconds, 3), "peak_memory": worker.peak_memory, "finished": finished}


def keep(folder: Path, action: Action, worker: WorkerResult, cache: Cache) -> None:
    """Publish the files of a passed verification, replacing an existing one."""
    with cache.staging(action) as staging:
        shutil.copytree(folder, staging.files, dirs_exist_ok=True)
        cache.forget(action)
        staging.publish({"passed": True}, _facts(worker))


def image_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def _reference(
    subject: Subject, selection: Selection, request: JudgeRequest, cache: Cache, how: How
) -> tuple[Record | None, WorkerResult | None]:
    """The reference from the cache; otherwise computed by the process that then judges. With a read-only cache it is
    written next to the request's results, without a record."""
    action = reference_action(subject, selection, cache)
    record = cache.lookup(action)
    if record is not None:
        return record, None

    def compute(out: Path) -> WorkerResult:
        wanted = wanted_of(subject, selection, out)
        return _work(wanted, replace(request, reference=wanted.out), subject, how)

    if not cache.writable:
        out = request.out / "reference"
        out.mkdir()
        return None, compute(out)
    group, progress = how.get("group"), how.get("progress", unheard)
    check = group.check if group is not None else stop.check
    with cache.lock(action, waiting=lambda: progress("another process computes the reference"), meanwhile=check):
        record = cache.lookup(action)
        if record is not None:
            return record, None
        with cache.staging(action) as staging:
            worker = compute(staging.files)
            return staging.publish(worker.value["reference"], _facts(worker)), worker


def _work(
    wanted: ReferenceRequest | None,
    request: JudgeRequest,
    subject: Subject,
    how: How,
    known: Verification | None = None,
) -> WorkerResult:
    whole = {*subject.checkpoint.family.drawing} <= {*request.submodels}
    content = {
        "reference": as_json(wanted) if wanted else None,
        "judge": as_json(request),
        "known": known.to_json() if known else None,
        "folder": as_json(FolderRequest(subject.folder.absolute(), source_of(subject.checkpoint), whole)),
    }
    return run_worker_on(content, subject.stamps, how)


def run_worker_on(content: Mapping[str, Any], stamps: Sequence[Stamp], how: How) -> WorkerResult:
    """Run the verifying process and return its answer. stamps: of the PyTorch model's files.

    Raises InputChanged if one of these files changed since its digest was computed.
    """
    with scratch_folder("log") as folder:
        log, group, progress = folder / "log.txt", how.get("group"), how.get("progress", unheard)
        run = group.run if group is not None else run_worker
        try:
            result = run(WORKER, content, log=log, environment=ENVIRONMENT, on_phase=progress)
        except (PassError, CheckpointError):
            check_stamps(stamps)  # a change may be the cause of the failure
            raise
    check_stamps(stamps)
    return result
