"""`sdflow verify` from the outside: the keys, the cache, the process that does the work.

    reference = what the PyTorch model computes          key: checkpoint, LoRAs, tokenizer and scheduler, selection
    verification = artifacts against the reference       key: artifacts, what lies beside them, target, the reference

Both are entries of the cache like any step's, so that a pipeline is verified once, and all targets share a reference.
A verification that did not pass is never kept.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow import stop
from sdflow.artifact import Action, Record
from sdflow.config.workflow import VerifySpec
from sdflow.digest import FileEntry, digest_json, digest_tree
from sdflow.errors import CheckpointError, PassError, TargetUnavailableError, UsageError
from sdflow.file_stamp import Stamp, check_stamps, folder_stamps
from sdflow.locked_folder import scratch_folder
from sdflow.machine.packages import distribution_version
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.availability import target_availability
from sdflow.store import Cache
from sdflow.verify import judge, reference
from sdflow.verify.folder import VERSION as FOLDER_VERSION
from sdflow.verify.folder import FolderRequest, source_of
from sdflow.verify.judge import JudgeRequest
from sdflow.verify.recipes import RecipeCheck, is_bound, structure_of
from sdflow.verify.reference import ReferenceRequest
from sdflow.verify.result import Verification
from sdflow.verify.selection import Selection, select
from sdflow.verify.stored import BoundModel
from sdflow.verify.subject import Subject
from sdflow.verify.torch_module import LoraMerge, TorchModule
from sdflow.weights.lora import LoraInput
from sdflow.worker_group import WorkerGroup
from sdflow.workers import WorkerResult, run_worker

WORKER = "sdflow.verify.worker"
RESULT_FILE = "verification.json"
ACTION_FORMAT = 1
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Of the process that verifies. glibc keeps what is freed: modules and graphs, gigabytes each, take one another's place, and
memory fresh from the system must be cleared page by page. torch's threads sleep while they wait: where another process
has a core, those that spin take the other one from the thread that they wait for (a small UNet's run: 6 s, not 0.1)."""
CARRIED = "its passes carried its weights, so that no recipes tell what they were before they were rounded"
GONE = "the cache no longer has the recipes of its weights; its workflow, run again, makes them anew"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verified:
    """A verification, and its images: file name -> PNG."""

    result: Verification
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class _Built:
    """What of a pipeline folder is verified. digests: submodel -> of what really lies there. structures: submodel -> what
    its weights were bound to, where the cache still has it. unproved: why there is none."""

    submodels: Sequence[str]
    digests: Mapping[str, str]
    structures: Mapping[str, Path]
    unproved: Mapping[str, str]


def verify_alone(
    subject: Subject,
    spec: VerifySpec,
    cache: Cache,
    *,
    submodels: Sequence[str] | None = None,
    fresh: bool = False,
    threads: int | None = None,
    progress: Progress = lambda phrase: None,
    group: WorkerGroup | None = None,
    run_on: str | None = None,
) -> Verified:
    """Verify a pipeline, without its refiner; from the cache where it passed before. submodels: only these. fresh: even so,
    once more. group: whose worker the process is; when that is ended, so is this. run_on: a target whose provider runs the
    artifacts too; then nothing comes from the cache or is kept in it, which does not know one device from another.

    A verification that does not pass is returned, not raised: see `Verification.raise_for_failure`.
    Raises CheckpointError when the reference cannot be loaded, PassError when a process dies, TargetUnavailableError when
    `run_on` is not here.
    """
    if run_on is not None:
        _require_here(run_on)
    started = time.perf_counter()
    folder_stamps = stamps_of_folder(subject.folder)  # before any digest is taken of it
    built = _built_part(subject, submodels, cache)
    selection = select(spec, subject.image, built.submodels, subject.checkpoint)
    with scratch_folder("verify") as scratch, cache.lease():
        request = _request(subject, spec, built, scratch, threads, run_on)
        exact, worker = _reference(subject, selection, request, cache, progress, group)
        action = _action(subject, spec, built, exact, cache) if exact is not None else None
        if worker is None:
            assert exact is not None and action is not None
            known = None if fresh or run_on is not None else cache.lookup(action)
            if known is not None:
                return _as_kept(known, subject)
            worker = _work(None, replace(request, reference=exact.artifact.path.absolute()), subject, progress, group)
        check_stamps(folder_stamps, "its verification began")
        result = replace(
            Verification.from_json(worker.value["verification"]),
            artifacts=dict(built.digests),
            versions={name: distribution_version(name) for name in (*reference.USES, "onnx", "onnxruntime")},
            seconds=round(time.perf_counter() - started, 1),
        )
        if not cache.writable:
            progress("the cache is read-only: what was found is not kept")
        elif result.passed and action is not None and run_on is None:
            _keep(result, scratch, action, worker, cache)
        return Verified(result, image_files(scratch))


def stamps_of_folder(folder: Path) -> list[Stamp]:
    try:
        return folder_stamps(folder)
    except OSError as error:  # a link to what is gone from the cache, say
        raise UsageError(
            f"cannot be read: {error.strerror}", where=str(error.filename or folder), remedy="Run its workflow again."
        ) from error


def _built_part(subject: Subject, submodels: Sequence[str] | None, cache: Cache) -> _Built:
    """Raises UsageError for a submodel that the pipeline does not have."""
    manifest = read_manifest(subject.folder)
    built = subject.checkpoint.family.ordered(manifest.parts)
    if unknown := sorted(set(submodels or ()) - set(built)):
        raise UsageError(f"the pipeline has no {unknown[0]}, only {', '.join(built)}", where=str(subject.folder))
    present = [name for name in built if submodels is None or name in submodels]
    chains = {name: manifest.origin.chains.get(name) for name in present}
    made_by = {name: structure_of(chain, cache.root) for name, chain in chains.items()}
    return _Built(
        present,
        digests={name: tree_digest(subject.folder / name, cache) for name in present},
        structures={name: path for name, path in made_by.items() if path is not None},
        unproved={name: GONE if is_bound(chains[name]) else CARRIED for name, path in made_by.items() if path is None},
    )


def _require_here(target: str) -> None:
    """Raises TargetUnavailableError, with the reason, when the target does not run on this machine."""
    (found,) = target_availability([target])
    if not found.available:
        raise TargetUnavailableError(
            f"the artifacts cannot run there: {found.reason}",
            where=f"--run-on {target}",
            remedy=found.remedy or "Leave --run-on out: the artifacts are verified on the CPU alone.",
        )


def _request(
    subject: Subject, spec: VerifySpec, built: _Built, out: Path, threads: int | None, run_on: str | None
) -> JudgeRequest:
    """What the process is asked; where the reference lies is not known yet."""
    return JudgeRequest(
        family=subject.checkpoint.family.name,
        folder=subject.folder.absolute(),
        name=subject.name,
        target=subject.target,
        level=spec.level,
        submodels=built.submodels,
        reference=Path(),
        out=out,
        modules=[_module(subject, name) for name in built.submodels],
        recipes=[_recipes(subject, name, path) for name, path in built.structures.items()],
        unproved=built.unproved,
        allow_fallback=subject.allow_fallback,
        threads=threads,
        run_on=run_on,
    )


def _action(subject: Subject, spec: VerifySpec, built: _Built, exact: Record, cache: Cache) -> Action:
    """The key of the verification. exact: the reference."""
    return Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "Verify", "version": judge.VERSION},
            "submodel": "pipeline",
            "config": {
                "level": spec.level,
                "target": subject.target,
                "submodels": sorted(built.submodels),
                "allow_fallback": subject.allow_fallback,
            },
            "inputs": {
                "artifacts": built.digests,
                "unproved": sorted(built.unproved),
                "structures": {name: tree_digest(path, cache) for name, path in built.structures.items()},
                "beside": beside_digest(subject.folder, built.digests, cache),
                "manifest": cache.stat.digest(subject.folder / MANIFEST_FILE),
                "source": _source(subject, cache),
                "reference": exact.artifact.digest,
            },
            "uses": {name: distribution_version(name) for name in judge.USES},
            "salt": cache.salt,
        }
    )


def _as_kept(record: Record, subject: Subject) -> Verified:
    """A verification of the cache, under the name that the pipeline has here."""
    folder = record.artifact.path
    stored = Verification.from_json(json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    return Verified(replace(stored, name=subject.name, cached=True), image_files(folder))


def _keep(result: Verification, scratch: Path, action: Action, worker: WorkerResult, cache: Cache) -> None:
    """Publish a verification that passed, in place of one that is there."""
    with cache.staging(action) as staging:
        shutil.copytree(scratch, staging.files, dirs_exist_ok=True)
        (staging.files / RESULT_FILE).write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
        cache.forget(action)
        staging.publish({"passed": True}, run_facts(worker))


def image_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def _reference(
    subject: Subject,
    selection: Selection,
    request: JudgeRequest,
    cache: Cache,
    progress: Progress,
    group: WorkerGroup | None,
) -> tuple[Record | None, WorkerResult | None]:
    """What PyTorch computes. Not in the cache, it is computed now, and the process that does so goes on to judge; on a
    read-only cache beside the request's results, without a record."""
    checkpoint = subject.checkpoint
    needed = _needed(selection, subject)
    action = Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "VerifyReference", "version": reference.VERSION},
            "submodel": "pipeline",
            "config": selection.to_json(),
            "inputs": {
                "checkpoint": {name: checkpoint.submodels[name].identity for name in needed},
                "companions": {name: tree_digest(path, cache) for name, path in checkpoint.companions.items()},
                **({"options": dict(checkpoint.options)} if checkpoint.options else {}),
                **({"scheduler": checkpoint.said["scheduler"]} if "scheduler" in checkpoint.said else {}),
                "loras": [{"sha256": lora.sha256, "scale": lora.scale} for lora in subject.loras],
            },
            "uses": {name: distribution_version(name) for name in reference.USES},
            "salt": cache.salt,
        }
    )
    record = cache.lookup(action)
    if record is not None:
        return record, None

    def compute(out: Path) -> WorkerResult:
        wanted = wanted_of(subject, selection, out)
        return _work(wanted, replace(request, reference=wanted.out), subject, progress, group)

    if not cache.writable:
        out = request.out / "reference"
        out.mkdir()
        return None, compute(out)
    check = group.check if group is not None else stop.check
    with cache.lock(action, waiting=lambda: progress("another process computes the reference"), meanwhile=check):
        record = cache.lookup(action)
        if record is not None:
            return record, None
        with cache.staging(action) as staging:
            worker = compute(staging.files)
            return staging.publish(worker.value["reference"], run_facts(worker)), worker


def _needed(selection: Selection, subject: Subject) -> list[str]:
    family = subject.checkpoint.family
    return sorted({*selection.submodels, *family.drawing, *family.beside(subject.checkpoint.submodels)})


def wanted_of(subject: Subject, selection: Selection, out: Path) -> ReferenceRequest:
    """What PyTorch is to compute, into the folder `out`."""
    checkpoint = subject.checkpoint
    return ReferenceRequest(
        family=checkpoint.family.name,
        loads={name: checkpoint.submodels[name].load for name in _needed(selection, subject)},
        companions={name: path.absolute() for name, path in checkpoint.companions.items()},
        options=checkpoint.options,
        scheduler=checkpoint.said.get("scheduler"),
        loras=_merges(subject),
        selection=selection,
        out=out.absolute(),
    )


def _recipes(subject: Subject, submodel: str, structure: Path) -> RecipeCheck:
    part = subject.checkpoint.submodels[submodel]
    loras = [LoraInput(lora.path.absolute(), lora.scale) for lora in subject.loras]
    bound = BoundModel((subject.folder / submodel).absolute(), part.load, loras, _denoiser(subject))
    return RecipeCheck(submodel, structure.absolute(), bound)


def _module(subject: Subject, submodel: str) -> TorchModule:
    """The PyTorch model of a submodel, with its LoRAs."""
    return TorchModule(submodel, subject.checkpoint.submodels[submodel].load, _merges(subject), _denoiser(subject))


def _merges(subject: Subject) -> list[LoraMerge]:
    return [LoraMerge(lora.path.absolute(), lora.scale) for lora in subject.loras]


def _denoiser(subject: Subject) -> Mapping[str, Any]:
    """Its config."""
    checkpoint = subject.checkpoint
    config: Mapping[str, Any] = checkpoint.submodels[checkpoint.family.denoiser].load["config"]
    return config


def _work(
    wanted: ReferenceRequest | None,
    request: JudgeRequest,
    subject: Subject,
    progress: Progress,
    group: WorkerGroup | None,
) -> WorkerResult:
    whole = {*subject.checkpoint.family.drawing} <= {*request.submodels}
    content = {
        "reference": wanted.to_json() if wanted else None,
        "judge": request.to_json(),
        "folder": FolderRequest(subject.folder.absolute(), source_of(subject.checkpoint), whole).to_json(),
    }
    return run_worker_on(content, subject.stamps, progress, group)


def run_worker_on(
    content: Mapping[str, Any], stamps: Sequence[Stamp], progress: Progress, group: WorkerGroup | None
) -> WorkerResult:
    """What the process that verifies answers. stamps: of what the PyTorch model is made of.

    Raises InputChanged when one of these files is no longer the one whose digest is in a key.
    """
    with scratch_folder("log") as folder:
        log = folder / "log.txt"
        run = group.run if group is not None else run_worker
        try:
            result = run(WORKER, content, log=log, environment=ENVIRONMENT, on_phase=progress)
        except (PassError, CheckpointError):
            check_stamps(stamps)  # what it failed of may be just that
            raise
    check_stamps(stamps)
    return result


def run_facts(worker: WorkerResult) -> dict[str, Any]:
    return {
        "seconds": round(worker.seconds, 3),
        "peak_memory": worker.peak_memory,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def tree_digest(folder: Path, cache: Cache) -> str:
    """The tree digest of what really lies in a folder, whatever a manifest says."""
    folder = folder.resolve()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_tree(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, cache.stat.digest(path)) for path in files
    )


def beside_digest(folder: Path, submodels: Container[str], cache: Cache) -> str:
    """Everything in the folder but sdflow.json and these submodels, whatever it is: a verification is about the
    folder as a whole."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST_FILE and path.name not in submodels:
            found[path.name] = cache.stat.digest(path) if path.is_file() else tree_digest(path, cache)
    return digest_json(found)


def _source(subject: Subject, cache: Cache) -> str:
    """What the folder is held to, and how."""
    source = source_of(subject.checkpoint).to_json()
    companions = {name: tree_digest(path, cache) for name, path in subject.checkpoint.companions.items()}
    return digest_json({**source, "companions": companions, "version": FOLDER_VERSION})
