"""`sdflow cache export` and `import`: move structures to machines without the packages that make them.

An exported structure matches a plan of this version, including the versions of installed packages. Each one is proven
first: bound to random weights of its architecture (or to the checkpoint of the named workflow), assembled, and verified
at the quick level like any pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow import __version__, stop
from sdflow.artifact import Record
from sdflow.build.execute import Executor
from sdflow.build.listener import Listener, Steps
from sdflow.build.plan import PipelinePlan, Plan, make_plan
from sdflow.config import load_workflow
from sdflow.config.workflow import EvaluateSpec, PipelineSpec, VerifySpec, Workflow
from sdflow.disk.locked_folder import scratch_folder
from sdflow.disk.shipped import shipped_workflow
from sdflow.errors import CacheError, UsageError
from sdflow.families import ARCHITECTURES
from sdflow.inspection.lines import base_of
from sdflow.machine.packages import REFERENCE, require_packages, versions
from sdflow.passes.registry import APPENDED, OWN, catalog, find_pass
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.sources.config_recognition import config_defaults
from sdflow.store import Cache
from sdflow.store.copying import answering, copy_entries
from sdflow.store.records import BadRecord, Stored
from sdflow.store.remote import RemoteSpec
from sdflow.store.remote.archives import require_archive, to_write
from sdflow.store.remote.down import WrongBytes
from sdflow.store.remote.entry import OtherVersion
from sdflow.store.remote.share import Absent, Unusable
from sdflow.store.remote.spec import at
from sdflow.store.signing import Signer, Untrusted
from sdflow.verify import Verification

SUFFIX = ".yaml"


@dataclass(frozen=True)
class Exported:
    """The result of an export. structures: as in the archive's `about`. bytes: of the archive, None for a folder or
    URL; unpacked: of its content."""

    where: str
    structures: Sequence[dict[str, Any]]
    bytes: int | None
    unpacked: int


@dataclass(frozen=True)
class Imported:
    """The result of an import. about: the archive's description. count: of entries; new: those that the cache
    lacked."""

    where: str
    about: Mapping[str, Any]
    count: int
    new: Sequence[Record]


def export_structures(
    names: Sequence[str],
    targets: Sequence[str],
    where: str | Path,
    cache: Cache,
    listener: Listener,
    *,
    verify: bool = True,
    jobs: int | None = None,
    signer: Signer | None = None,
) -> Exported:
    """Write the structures of architectures, by name, and of workflows, by file, for these targets to an archive, a
    folder or a URL.

    Missing ones are built. targets: default: those of the workflows. verify: prove each first. signer: signs the
    result. Raises UsageError for unknown names and for chains that carry their weights, and everything that a run
    raises.
    """
    spec = RemoteSpec(at(str(where), "sdflow cache export"), push=True)
    require_archive(spec)
    if verify:
        require_packages("verifying exported structures", *REFERENCE)
    workflows = [_workflow(name, targets, verify) for name in names]
    records: list[Record] = []
    descriptions, architectures = [], list[dict[str, Any]]()
    with cache.lease():
        for name, workflow in zip(names, workflows, strict=True):
            made = (
                _verified(workflow, cache, listener, jobs) if verify else _unverified(workflow, cache, listener, jobs)
            )
            for each in made:
                structures = list(_structures(each.steps))
                records += structures
                descriptions.append(_description(name, each, structures))
                architectures += [config for config in _architectures(each.steps) if config not in architectures]
        about = {
            "sdflow": __version__,
            "versions": versions(),
            "structures": descriptions,
            "architectures": architectures,
        }
        for record in records:
            cache.check(record.artifact)
        actions = list({record.action.digest: record.action for record in records}.values())
        with to_write(spec) as place:
            to = cache.at(place, signer)
            copy_entries(to, actions, up=True)
            with answering(to.remote) as remote:
                remote.export(about, [action.digest for action in actions])
    unpacked = {record.artifact.digest: record.artifact.bytes for record in records}
    size = spec.archive.stat().st_size if spec.archive else None
    return Exported(spec.shown, descriptions, size, sum(unpacked.values()))


def _workflow(name: str, targets: Sequence[str], verify: bool) -> Workflow:
    """The workflow whose chains make the structures: an architecture's with random weights, or a file's."""
    overrides = []
    if name.endswith(SUFFIX):
        path: Path | None = Path(name)
    elif name in ARCHITECTURES:
        path, overrides = shipped_workflow(base_of(name)), [f"model=synthetic:{name}"]
    else:
        raise UsageError(
            f"no architecture is called {name!r}",
            where="--structures",
            remedy=f"Known: {', '.join(ARCHITECTURES)}; or name a workflow, FILE{SUFFIX}.",
        )
    assert path is not None, "it ships with sdflow"
    loaded = load_workflow(path, catalog=catalog(), overrides=overrides, targets=targets)

    def of_structures(pipeline: PipelineSpec) -> PipelineSpec:
        return replace(
            pipeline,
            evaluate=EvaluateSpec(latency=None, image=None),
            verify=VerifySpec() if verify else None,
            refiner=None if pipeline.refiner is None else of_structures(pipeline.refiner),
        )

    return replace(loaded, pipelines=tuple(of_structures(pipeline) for pipeline in loaded.pipelines))


@dataclass(frozen=True)
class _Made:
    """One architecture for one target."""

    pipeline: PipelineSpec
    steps: Steps
    verification: Verification | None = None


def _verified(workflow: Workflow, cache: Cache, listener: Listener, jobs: int | None) -> list[_Made]:
    """Build and verify whole pipelines, in a temporary folder."""
    with scratch_folder("export") as scratch:
        options = RunOptions(out=scratch / "pipelines", results=scratch / "results", evaluate=False, jobs=jobs)
        run = run_workflow(workflow, cache, options, listener, planned=_require_structures)
        return [_Made(each.plan.pipeline, each.steps, each.verification) for each in run.pipelines]


def _unverified(workflow: Workflow, cache: Cache, listener: Listener, jobs: int | None) -> list[_Made]:
    """Build only the graphs, without binding weights."""
    plan = make_plan(workflow, cache, download=True)
    _require_structures(plan)
    graphs = replace(plan, pipelines=tuple(map(_without_weights, plan.pipelines)))
    graphs.require_buildable(cache)
    executor = Executor(cache, listener, jobs=jobs)
    return [_Made(each.pipeline, executor.run(each)) for each in graphs.pipelines]


def _without_weights(plan: PipelinePlan) -> PipelinePlan:
    chains = tuple(replace(chain, steps=chain.steps[:-1], carried=()) for chain in plan.chains)
    return replace(plan, chains=chains, refiner=None if plan.refiner is None else _without_weights(plan.refiner))


def _require_structures(plan: Plan) -> None:
    """Raises UsageError for a chain without a structure."""
    for each in plan.every:
        carried = [chain.submodel for chain in each.chains if chain.steps[-1].weights == "carried"]
        _refuse(carried, each.pipeline.name)


def _structures(steps: Steps) -> Iterator[Record]:
    # A pass may turn out to read a weight; its chain then carries weights.
    _refuse([name for name, chain in steps.items() if any(each.step.weights == "carried" for each in chain)], "export")
    for chain in steps.values():
        yield from (each.record for each in chain if each.step.weights == "symbolic")


def _architectures(steps: Steps) -> Iterator[dict[str, Any]]:
    """Each config.json, with defaults of entries that other library releases may omit."""
    for chain in steps.values():
        source = chain[0].step.source
        assert source is not None, "it was built"
        yield {"config": source.load["config"], "defaults": config_defaults(source.load["config"])}


def _refuse(carried: Sequence[str], where: str) -> None:
    if carried:
        raise UsageError(
            f"the graphs of {', '.join(carried)} contain their weights: there is no structure to export",
            where=where,
            remedy="`sdflow plan` says why.",
        )


def _description(name: str, made: _Made, records: Sequence[Record]) -> dict[str, Any]:
    """The archive's description of one architecture's structures for one target."""
    verified = None
    if (verification := made.verification) is not None:
        verified = {"level": verification.level, "versions": dict(verification.versions)}
    return {
        "name": Path(name).name,
        "target": made.pipeline.target,
        "model": made.pipeline.model,
        "submodels": list(made.steps),
        "actions": [record.action.digest for record in records],
        "bytes": sum({record.artifact.digest: record.artifact.bytes for record in records}.values()),
        "verified": verified,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def import_structures(where: str | Path, cache: Cache, trust: Sequence[str] = ()) -> Imported:
    """Import all structures from an archive, a folder or a URL into the cache, or none.

    trust: signers, one of whom must have signed them. Raises UsageError for an invalid or damaged archive, or one of
    another version of sdflow's passes, or with anything but structures; CacheError if the cache is not writable.
    """
    if not cache.writable:
        raise CacheError(
            "the cache cannot be written",
            where=str(cache.root),
            remedy="Make it writable, or name another with --cache.",
        )
    where, said = str(where), list[str]()
    if "://" not in where and not Path(where).exists():
        raise UsageError("no such file or folder", where=where, remedy="Check the path.")
    try:
        source = cache.at(RemoteSpec(at(where, "sdflow cache import"), trust=tuple(trust)))
        assert source.remote is not None
        source.remote.tell = said.append
        about, entries = source.remote.exported(stop.check)
        _require_structures_of_ours(about, entries)
        copied = copy_entries(source, [entry.action for entry in entries], up=False, whole=True)
        if len(copied.new) < copied.missing:
            raise Absent(source.remote.distrusted or "parts of them")
    except OtherVersion as error:
        who, how = ("A newer", "Update sdflow, or export") if error.newer else ("Another", "Export")
        raise UsageError(
            f"{who.lower()} version of sdflow wrote it: {error}",
            where=where,
            remedy=f"Nothing was imported. {how} the structures again with sdflow {__version__}.",
        ) from error
    except (Absent, Untrusted, BadRecord, WrongBytes, Unusable, CacheError) as error:
        why = error.what if isinstance(error, CacheError) else error
        what = {
            Absent: "contains no exported structures, or not all of them",
            Untrusted: "has no signature from anyone you trust",
        }
        raise UsageError(
            "; ".join([f"{what.get(type(error), 'is not an archive of structures, or is damaged')}: {why}", *said]),
            where=where,
            remedy="Nothing was imported. Copy it again, or recreate it with `sdflow cache export`.",
        ) from error
    cache.notes.note_imported([entry.action for entry in entries], about.get("architectures", ()))
    return Imported(where, about, len(entries), copied.new)


def _require_structures_of_ours(about: Mapping[str, Any], entries: Sequence[Stored]) -> None:
    for entry in entries:
        _require_pass(about, entry.action.content.get("pass"))
    for entry in entries:
        content = entry.action.content
        if (
            not entry.action.of_step
            or content.get("weights") != "symbolic"
            or not isinstance(content.get("uses"), dict)
        ):
            raise BadRecord("it contains something other than structures")
    known = about.get("architectures", [])
    maps = [each.get(part) for each in known for part in ("config", "defaults")] if _are_maps(known) else [None]
    if not _are_maps(maps):
        raise BadRecord("it does not name its architectures")


def _are_maps(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, dict) for each in found)


def _require_pass(about: Mapping[str, Any], named: Any) -> None:
    """Raises OtherVersion if one of sdflow's own passes has another version here: no plan would find its result."""
    name, version = (named.get("name"), named.get("version")) if isinstance(named, dict) else (None, None)
    if not isinstance(name, str) or name not in OWN | APPENDED:
        return
    here = find_pass(name, Path()).version
    if version != here:
        raise OtherVersion(
            f"sdflow {about.get('sdflow')!s:.20} has version {version!r:.10} of {name}, and this one version {here}, so it "
            "would never be used",
            newer=isinstance(version, int) and version > here,
        )
