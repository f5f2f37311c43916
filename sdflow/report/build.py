"""Output of `sdflow validate`, `sdflow plan` and `sdflow explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdflow.build.chain import PlannedStep
from sdflow.build.lock_content import Lock
from sdflow.build.plan import Plan
from sdflow.errors import Problem, UsageError
from sdflow.fits.device import Device, fit_of
from sdflow.report.output import print_json, print_table, put
from sdflow.store import Cache
from sdflow.store.remote.up import FROM

MAKES = {"symbolic": "graph", "bound": "weights", "carried": "both"}
"""The product of a step, by its handling of weights."""


def print_validation(valid: Mapping[str, Sequence[str]], problems: Sequence[Problem], *, as_json: bool) -> None:
    """The valid workflows with their pipelines; as JSON, also the problems of the others."""
    if as_json:
        print_json(
            "validation",
            {
                "valid": [{"workflow": path, "pipelines": list(names)} for path, names in valid.items()],
                "problems": [asdict(problem) for problem in sorted(set(problems))],
            },
        )
        return
    for path, names in valid.items():
        put(f"{path}: valid ({', '.join(names)})")


def print_plan(plans: Sequence[Plan], cache: Cache, device: Device, *, as_json: bool, verbose: bool = False) -> None:
    """The numbers of cached steps and steps to run per submodel, with reasons; and whether the pipelines fit the
    device. verbose: each step."""
    planned = [(pipeline, list(pipeline.steps(cache))) for plan in plans for pipeline in plan.every]
    fits = {pipeline.pipeline.name: fit_of(pipeline, device) for plan in plans for pipeline in plan.pipelines}
    if as_json:
        listed = [_planned_json(step) for _, steps in planned for step in steps]
        notes = [note for pipeline, _ in planned for note in pipeline.notes]
        print_json(
            "plan", {"steps": listed, "notes": notes, "memory": {name: each.as_json() for name, each in fits.items()}}
        )
        return
    for pipeline, steps in planned:
        title = f"{pipeline.pipeline.name}: {pipeline.pipeline.model} for {pipeline.pipeline.target}"
        if verbose:
            rows = [
                (step.step.submodel, step.step.name, MAKES[step.step.weights], step.state, "; ".join(step.reasons))
                for step in steps
            ]
            print_table(title, ("submodel", "pass", "makes", "state", "reason"), rows)
        else:
            submodels = dict.fromkeys(step.step.submodel for step in steps)
            of_each = {name: [step for step in steps if step.step.submodel == name] for name in submodels}
            short = [(name, *_planned_cells(chain)) for name, chain in of_each.items()]
            print_table(title, ("submodel", "steps", "first to run", "reason"), short)
        for note in pipeline.notes:
            put(f"  {note}")
        if pipeline.pipeline.name in fits:
            put(fits[pipeline.pipeline.name].words)
    every = [step for _, steps in planned for step in steps]
    if verbose and any(step.step.weights == "symbolic" for step in every):
        put(
            "graph: built without weights, once for all checkpoints and LoRAs of an architecture; "
            "weights: written into that graph"
        )
    remote = sum(step.state == "remote" for step in every)
    elsewhere = f", {remote} come from {cache.remote.spec.shown}" if cache.remote is not None and remote else ""
    put(f"{sum(step.state == 'cached' for step in every)} of {len(every)} steps are cached{elsewhere}")


def _planned_cells(chain: Sequence[PlannedStep]) -> tuple[str, str, str]:
    """ "1 cached, 2 to run", the first pass that would run, and why."""
    states = [step.state for step in chain]
    first = next((step for step in chain if step.state != "cached"), None)
    return (
        ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states)),
        first.step.name if first else "",
        _first_of(first.reasons) if first else "",
    )


def _first_of(reasons: Sequence[str]) -> str:
    more = len(reasons) - 1
    return f"{reasons[0]}{f', and {more} more (-v)' if more > 0 else ''}" if reasons else ""


def _planned_json(planned: PlannedStep) -> dict[str, Any]:
    return {
        "step": planned.step.id,
        "pass": planned.step.name,
        "makes": MAKES[planned.step.weights],
        "state": planned.state,
        "reasons": list(planned.reasons),
        "failure": None if planned.failure is None else {"at": planned.failure.at, "error": planned.failure.error},
        "action": planned.action.digest if planned.action else None,
        "artifact": planned.record.artifact.digest if planned.record else None,
    }


def print_locks(written: Sequence[tuple[Path, Lock]], *, as_json: bool, quiet: bool = False) -> None:
    """The locks' paths and content."""
    if as_json:
        print_json("locks", {"locks": [{"file": str(path), **lock.model_dump()} for path, lock in written]})
        return
    for path, lock in written:
        commits = sum(each.commit is not None for each in lock.inputs.values())
        counts = {"input": len(lock.inputs), "hub commit": commits, "package": len(lock.packages)}
        counts |= {"pipeline": len(lock.pipelines)}
        held = ", ".join(f"{number} {what}{'s' if number != 1 else ''}" for what, number in counts.items())
        put(path if quiet else f"{path}: {held}", wrap=not quiet)


def print_explanation(plans: Sequence[Plan], cache: Cache, *, only: str | None, as_json: bool) -> None:
    """The changes in each step since its last build."""
    chosen = [
        step
        for plan in plans
        for pipeline in plan.every
        for step in pipeline.steps(cache)
        if only is None or only in f"{step.step.id} {step.step.name}"
    ]
    if only is not None and not chosen:
        raise UsageError(f"no step's name contains {only!r}", where="--step", remedy="See `sdflow plan` for the steps.")
    if as_json:
        print_json("explanation", {"steps": [_planned_json(step) for step in chosen]})
        return
    claims = _claims(chosen, cache)
    for step in chosen:
        built = f"built {step.record.built['finished']}" if step.record else ""
        lines = [f"unchanged, {built}"] if step.state == "cached" else list(step.reasons)
        if (failure := step.failure) is not None:
            failed = f"{lines[0]}; failed {failure.at}" if step.state == "cached" else f"failed {failure.at}"
            lines = [failed, *failure.error.splitlines(), *lines[1:]]
        put(f"{step.step.id} {step.step.name} ({MAKES[step.step.weights]}): {lines[0] if lines else ''}")
        for line in (*lines[1:], *claims.get(step.step.id, ())):
            put(f"  {line}")


def _claims(steps: Sequence[PlannedStep], cache: Cache) -> dict[str, list[str]]:
    """For steps from the remote cache: who claims to have verified them."""
    if cache.remote is None:
        return {}
    objects = {}
    for step in steps:
        if step.record is not None and FROM in step.record.built:
            objects[step.step.id] = step.record.artifact.digest
        elif step.state == "remote" and step.action is not None and (entry := cache.remote.look(step.action.digest)):
            objects[step.step.id] = entry.object
    found = cache.remote.claims(objects.values()) if objects else {}
    return {name: [said.words for said in found.get(digest, ())] for name, digest in objects.items()}
