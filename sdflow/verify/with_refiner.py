"""Verify a pipeline with its refiner: each by itself, the refiner only where it differs from the base, and their joint
image. Each is a cache entry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from sdflow import stop
from sdflow.artifact import Action
from sdflow.config.workflow import VerifySpec
from sdflow.disk.file_stamp import check_stamps
from sdflow.disk.locked_folder import scratch_folder
from sdflow.families.shared.image_prompts import adapter_count
from sdflow.machine.packages import distribution_version
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.store import Cache
from sdflow.verify import ensemble
from sdflow.verify.artifact import judge
from sdflow.verify.as_json import as_json
from sdflow.verify.check import How, Verified, image_files, keep, run_worker_on, stamps_of_folder, verify_alone
from sdflow.verify.ensemble import EnsembleRequest
from sdflow.verify.folder.provenance import compare_with_provenance
from sdflow.verify.keys import ACTION_FORMAT, digest_of_other_files, tree_digest
from sdflow.verify.reference import reference
from sdflow.verify.reference.selection import Selection, select
from sdflow.verify.requests import wanted_of
from sdflow.verify.result import ImageVerdict, Verification
from sdflow.verify.subject import Subject

HAND_OVER = 0.5
"""Where the refiner takes over: early enough that both have steps."""
LEAST_STEPS = 4
RESULT_FILE = "ensemble.json"


def verify(
    subject: Subject, spec: VerifySpec, cache: Cache, *, submodels: Sequence[str] | None = None, **how: Unpack[How]
) -> Verified:
    """Verify a pipeline and its refiner, if it has one. Arguments as in `verify_alone`; submodels: the refiner's are
    `refiner/SUBMODEL`.

    The joint image needs all submodels. Also compares the folder with its provenance.
    """
    verified = _verify(subject, spec, cache, submodels=submodels, **how)
    changed = tuple(compare_with_provenance(subject.folder, cache.stat))
    result = verified.result
    return replace(verified, result=replace(result, findings=(*result.findings, *changed))) if changed else verified


def _verify(
    subject: Subject, spec: VerifySpec, cache: Cache, *, submodels: Sequence[str] | None = None, **how: Unpack[How]
) -> Verified:
    if subject.refiner is None:
        return verify_alone(subject, spec, cache, submodels=submodels, **how)
    own = None if submodels is None else [name for name in submodels if not name.startswith(f"{REFINER}/")]
    found: list[Verified] = []
    if own is None or own:
        found.append(verify_alone(subject, spec, cache, submodels=own, **how))
    refiners = _of_the_refiner(subject, submodels)
    if refiners:
        found.append(_named(verify_alone(subject.refiner, spec, cache, submodels=refiners, **how)))
    config = subject.checkpoint.submodels[subject.checkpoint.family.denoiser].load["config"]
    if submodels is None and adapter_count(config):
        merged = _merged(subject, [each.result for each in found])
        coverage = "base and refiner: no joint image, because the base has IP-Adapters"
        return Verified(replace(merged, coverage=(*merged.coverage, coverage)), found[0].images)
    if submodels is None and all(each.result.passed for each in found):
        image, images, cached = both(subject, subject.refiner, spec, cache, **how)
        result = replace(_merged(subject, [each.result for each in found]), ensemble=image)
        coverage = f"base and refiner: {_steps(spec)} steps, the refiner takes over at {HAND_OVER:g} of the steps"
        result = replace(result, coverage=(*result.coverage, coverage), cached=result.cached and cached)
        return Verified(result, {**found[0].images, **images})
    return Verified(_merged(subject, [each.result for each in found]), found[0].images)


def _of_the_refiner(subject: Subject, submodels: Sequence[str] | None) -> list[str]:
    """The refiner's submodels to verify: the requested ones, or those that differ from the base's."""
    assert subject.refiner is not None
    if submodels is not None:
        begins = f"{REFINER}/"
        return [name.removeprefix(begins) for name in submodels if name.startswith(begins)]
    base, refiner = (read_manifest(each.folder).artifacts for each in (subject, subject.refiner))
    return [name for name, digest in refiner.items() if base.get(name) != digest]


def _named(verified: Verified) -> Verified:
    """Rename its submodels as the refiner's, and drop its image, since the base has one."""

    def named(found: Any) -> dict[str, Any]:
        return {f"{REFINER}/{name}": each for name, each in found.items()}

    result = verified.result
    findings = tuple(replace(each, submodel=f"{REFINER}/{each.submodel}".removesuffix("/")) for each in result.findings)
    submodels = {name: replace(each, name=name) for name, each in named(result.submodels).items()}
    changed = replace(
        result,
        submodels=submodels,
        findings=findings,
        overflowing=named(result.overflowing),
        artifacts=named(result.artifacts),
        coverage=tuple(f"{REFINER}: {line}" for line in result.coverage),
        image=None,
        meaning=None,
    )
    return Verified(changed, {})


def _merged(subject: Subject, results: Sequence[Verification]) -> Verification:
    """Combine several verifications. The first has the image."""
    first, *others = results
    for each in others:
        first = replace(
            first,
            submodels={**first.submodels, **each.submodels},
            findings=(*first.findings, *each.findings),
            overflowing={**first.overflowing, **each.overflowing},
            artifacts={**first.artifacts, **each.artifacts},
            coverage=(*first.coverage, *each.coverage),
            seconds=round(first.seconds + each.seconds, 1),
            cached=first.cached and each.cached,
        )
    return replace(first, name=subject.name)


def _steps(spec: VerifySpec) -> int:
    return max(LEAST_STEPS, spec.steps or LEAST_STEPS)


def both(
    subject: Subject, refiner: Subject, spec: VerifySpec, cache: Cache, **how: Unpack[How]
) -> tuple[ImageVerdict, dict[str, bytes], bool]:
    """The joint image; its files; whether they were cached. Generated on this machine's CPU, whatever `run_on` says."""
    folder_stamps = [stamp for each in (subject, refiner) for stamp in stamps_of_folder(each.folder)]
    family = subject.checkpoint.family
    selection = select(spec, subject.image, family.drawing, subject.checkpoint)
    selection = replace(selection, steps=_steps(spec), sample_cases=0)
    action = _action(subject, refiner, selection, cache)
    known = None if how.get("fresh") else cache.lookup(action)
    if known is not None:
        return _read(known.artifact.path), image_files(known.artifact.path), True
    with scratch_folder("verify") as scratch, cache.lease():
        request = EnsembleRequest(
            wanted_of(subject, selection, scratch),
            wanted_of(refiner, replace(selection, submodels=refiner.checkpoint.family.drawing), scratch),
            (subject.folder.absolute(), refiner.folder.absolute()),
            subject.target,
            HAND_OVER,
            how.get("threads"),
        )
        stop.check()
        stamps = [*subject.stamps, *refiner.stamps]
        worker = run_worker_on({"ensemble": as_json(request)}, stamps, how)
        check_stamps(folder_stamps, "its verification began")
        (scratch / RESULT_FILE).write_text(json.dumps(worker.value["image"]), encoding="utf-8")
        verdict, images = _read(scratch), image_files(scratch)
        if cache.writable and not verdict.problems:
            keep(scratch, action, worker, cache)
        return verdict, images, False


def _read(folder: Path) -> ImageVerdict:
    value = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    return ImageVerdict(**{**value, "problems": tuple((what, remedy) for what, remedy in value["problems"])})


def _action(subject: Subject, refiner: Subject, selection: Selection, cache: Cache) -> Action:
    """The key of the joint image."""

    def drawn_by(each: Subject) -> dict[str, Any]:
        checkpoint = each.checkpoint
        return {
            "artifacts": {name: tree_digest(each.folder / name, cache) for name in checkpoint.family.drawing},
            "beside": digest_of_other_files(each.folder, checkpoint.submodels, cache),
            "manifest": cache.stat.digest(each.folder / MANIFEST_FILE),
            "checkpoint": {name: checkpoint.submodels[name].identity for name in sorted(checkpoint.submodels)},
            "companions": {name: tree_digest(path, cache) for name, path in checkpoint.companions.items()},
            "said": dict(checkpoint.said),
            "loras": [{"sha256": lora.sha256, "scale": lora.scale} for lora in each.loras],
        }

    uses = {*judge.USES, *reference.USES}
    return Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "VerifyEnsemble", "version": ensemble.VERSION},
            "submodel": "pipeline",
            "config": {"target": subject.target, "hand_over": HAND_OVER, "selection": as_json(selection)},
            "inputs": {"base": drawn_by(subject), "refiner": drawn_by(refiner)},
            "uses": {name: distribution_version(name) for name in sorted(uses)},
            "salt": cache.salt,
        }
    )
