"""`sdflow verify` from the outside: who is verified against what, the keys, the cache, the two processes.

    reference = what the PyTorch model computes          key: checkpoint, LoRAs, tokenizer and scheduler, selection
    verification = artifacts against the reference       key: artifacts, what lies beside them, target, the reference

Both are entries of the cache like any step's, so that a pipeline is verified once, and all targets share a reference.
A verification that did not pass is never kept.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdflow.artifact import Action, Record
from sdflow.assemble import MANIFEST_FILE, read_manifest
from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.digest import FileEntry, digest_json, digest_tree
from sdflow.errors import UsageError
from sdflow.passes.base import SUBMODELS
from sdflow.plan import distribution_version
from sdflow.sources import Checkpoint, find_lora, lora_submodels, open_checkpoint
from sdflow.step import LoraFile
from sdflow.store import Cache
from sdflow.verify import judge, reference
from sdflow.verify.judge import JudgeRequest
from sdflow.verify.reference import LoraMerge, ReferenceRequest
from sdflow.verify.result import Verification
from sdflow.verify.selection import Selection, select
from sdflow.workers import WorkerResult, run_worker

WORKER = "sdflow.verify.worker"
RESULT_FILE = "verification.json"
ACTION_FORMAT = 1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is verified: an assembled pipeline folder, and the checkpoint and LoRAs that it must compute.

    image: its prompts, guidance and seed are the trajectory's. allow_fallback: nodes may run on another provider.
    """

    name: str
    target: str
    folder: Path
    checkpoint: Checkpoint
    loras: Sequence[LoraFile] = ()
    image: ImageSpec = field(default_factory=ImageSpec)
    allow_fallback: bool = False


@dataclass(frozen=True)
class Verified:
    """A verification, and the folder with its pictures."""

    result: Verification
    pictures: Path


def subject_of_folder(folder: Path, cache: Cache, *, target: str | None = None) -> Subject:
    """The subject that a pipeline folder's sdflow.json names.

    Raises UsageError when the folder is no pipeline of sdflow, or the checkpoint or a LoRA is not what it was.
    """
    manifest = read_manifest(folder)
    where, again = str(folder / MANIFEST_FILE), "Put back what it was built from, or run its workflow again."
    try:
        model, provenance = manifest["model"], manifest["checkpoint"]
        commit = provenance.get("commit")
        pinned = f"{model.partition('@')[0]}@{commit}" if commit else model
        checkpoint = open_checkpoint(pinned, digests=cache.stat, download=False, allow_pickle=manifest["allow_pickle"])
        if checkpoint.provenance != provenance:
            raise UsageError(f"the checkpoint {model} is not the one it was built from", where=where, remedy=again)
        loras = []
        for entry in manifest["loras"]:
            path = find_lora(entry["reference"], entry["weight_name"], download=False)
            if cache.stat.digest(path) != entry["sha256"]:
                raise UsageError(f"the LoRA {path} is not the one it was built with", where=where, remedy=again)
            loras.append(LoraFile(entry["reference"], path, entry["sha256"], entry["scale"], lora_submodels(path)))
        return Subject(manifest["name"], target or manifest["target"], folder, checkpoint, loras, own_image(model))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"does not say how the pipeline was built: {error}", where=where, remedy=again) from error


def own_image(model: str) -> ImageSpec:
    """What is drawn where no workflow says it; the sample knows the words of its own captions only."""
    if model != "sample:shapes":
        return ImageSpec()
    return ImageSpec(prompt="a large red circle on a blue background", guidance_scale=12.0)


def verify(
    subject: Subject,
    spec: VerifySpec,
    cache: Cache,
    *,
    submodels: Sequence[str] | None = None,
    fresh: bool = False,
    threads: int | None = None,
    progress: Progress = lambda phrase: None,
) -> Verified:
    """Verify a pipeline; from the cache where it passed before. submodels: only these. fresh: even so, once more.

    A verification that does not pass is returned, not raised: see `Verification.raise_for_failure`. Its pictures are in
    a folder of the cache's results when it passed, else in a temporary one that the caller removes.
    Raises CheckpointError when the reference cannot be loaded, PassError when a process dies.
    """
    started = time.perf_counter()
    manifest = read_manifest(subject.folder)
    built = [name for name in SUBMODELS if name in manifest["submodels"]]
    if unknown := sorted(set(submodels or ()) - set(built)):
        raise UsageError(f"the pipeline has no {unknown[0]}, only {', '.join(built)}", where=str(subject.folder))
    present = [name for name in built if submodels is None or name in submodels]
    loads = subject.checkpoint.submodels
    selection = select(
        spec,
        subject.image,
        present,
        subject.checkpoint.reference,
        loads["unet"].load["config"],
        loads["vae_decoder"].load["config"],
    )
    with cache.lease():
        exact = _reference(subject, selection, cache, progress)
        digests = {name: _tree(subject.folder / name, cache) for name in present}
        action = Action(
            {
                "format": ACTION_FORMAT,
                "pass": {"name": "Verify", "version": judge.VERSION},
                "submodel": "pipeline",
                "config": {
                    "level": spec.level,
                    "target": subject.target,
                    "submodels": sorted(present),
                    "allow_fallback": subject.allow_fallback,
                },
                "inputs": {
                    "artifacts": digests,
                    "beside": _companions(subject.folder, cache),
                    "manifest": cache.stat.digest(subject.folder / MANIFEST_FILE),
                    "reference": exact.artifact.digest,
                },
                "uses": {name: distribution_version(name) for name in judge.USES},
                "salt": cache.salt,
            }
        )
        known = None if fresh else cache.lookup(action)
        if known is not None:
            stored = json.loads((known.artifact.path / RESULT_FILE).read_text(encoding="utf-8"))
            result = Verification.from_json(stored)
            return Verified(replace(result, name=subject.name, cached=True), known.artifact.path)
        return _judge(subject, spec, present, digests, exact, action, cache, threads, started, progress)


def _reference(subject: Subject, selection: Selection, cache: Cache, progress: Progress) -> Record:
    """What PyTorch computes, from the cache or computed now by one of the processes that want it."""
    needed = sorted({*selection.submodels, "text_encoder", "unet", "vae_decoder"})
    action = Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "VerifyReference", "version": reference.VERSION},
            "submodel": "pipeline",
            "config": selection.to_json(),
            "inputs": {
                "checkpoint": {name: subject.checkpoint.submodels[name].identity for name in needed},
                "companions": {name: _tree(path, cache) for name, path in subject.checkpoint.companions.items()},
                "loras": [{"sha256": lora.sha256, "scale": lora.scale} for lora in subject.loras],
            },
            "uses": {name: distribution_version(name) for name in reference.USES},
            "salt": cache.salt,
        }
    )
    record = cache.lookup(action)
    if record is not None:
        return record
    with cache.lock(action, waiting=lambda: progress("another process computes the reference")):
        record = cache.lookup(action)
        if record is not None:
            return record
        with cache.staging(action) as staging:
            request = ReferenceRequest(
                loads={name: subject.checkpoint.submodels[name].load for name in needed},
                companions={name: path.absolute() for name, path in subject.checkpoint.companions.items()},
                loras=[LoraMerge(lora.path.absolute(), lora.scale) for lora in subject.loras],
                selection=selection,
                out=staging.files.absolute(),
            )
            worker = _work({"work": "reference", **request.to_json()}, progress)
            return staging.publish(worker.value, _built(worker))


def _judge(
    subject: Subject,
    spec: VerifySpec,
    present: Sequence[str],
    digests: Mapping[str, str],
    exact: Record,
    action: Action,
    cache: Cache,
    threads: int | None,
    started: float,
    progress: Progress,
) -> Verified:
    with cache.staging(action) as staging:
        request = JudgeRequest(
            folder=subject.folder.absolute(),
            name=subject.name,
            target=subject.target,
            level=spec.level,
            submodels=present,
            reference=exact.artifact.path.absolute(),
            out=staging.files.absolute(),
            allow_fallback=subject.allow_fallback,
            threads=threads,
        )
        worker = _work({"work": "judge", **request.to_json()}, progress)
        result = replace(
            Verification.from_json(worker.value),
            artifacts=dict(digests),
            versions={name: distribution_version(name) for name in (*reference.USES, "onnx", "onnxruntime")},
            seconds=round(time.perf_counter() - started, 1),
        )
        if not result.passed:
            kept = Path(tempfile.mkdtemp(prefix="sdflow-verify-"))
            for picture in staging.files.glob("*.png"):
                (kept / picture.name).write_bytes(picture.read_bytes())
            return Verified(result, kept)
        (staging.files / RESULT_FILE).write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
        cache.forget(action)
        record = staging.publish({"passed": True}, _built(worker))
        return Verified(result, record.artifact.path)


def _work(request: Mapping[str, Any], progress: Progress) -> WorkerResult:
    with tempfile.TemporaryDirectory(prefix="sdflow-log-") as folder:
        return run_worker(WORKER, request, log=Path(folder) / "log.txt", on_phase=progress)


def _built(worker: WorkerResult) -> dict[str, Any]:
    return {
        "seconds": round(worker.seconds, 3),
        "peak_memory": worker.peak_memory,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _tree(folder: Path, cache: Cache) -> str:
    """The tree digest of what really lies in a folder, whatever a manifest says."""
    folder = folder.resolve()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_tree(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, cache.stat.digest(path)) for path in files
    )


def _companions(folder: Path, cache: Cache) -> str:
    names = ("tokenizer", "scheduler", "feature_extractor")
    return digest_json({name: _tree(folder / name, cache) for name in names if (folder / name).is_dir()})
