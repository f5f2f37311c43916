"""Imported structures, for machines without the packages that make them (torch, olive-ai, diffusers).

A step's key holds package versions, which are unknown here. They are taken from the imported structure of the same
architecture, pass and options: other versions would make another structure. The plan names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from sdflow.artifact import Action
from sdflow.build.step import Step
from sdflow.errors import UsageError
from sdflow.families import FAMILIES, part_of
from sdflow.machine.packages import found_version, how_to_install, lacks
from sdflow.sources.architectures import architecture_config
from sdflow.sources.checkpoint import config_digest
from sdflow.sources.config_recognition import same_architecture
from sdflow.store import Cache


def as_imported(steps: Sequence[Step], cache: Cache) -> tuple[Step, ...]:
    """Return the steps of a structure, in order; if one cannot run here, each gets the imported structure's versions.

    From the first step that was not imported on, steps have no key.
    """
    if not any(step.lacks for step in steps):
        return tuple(steps)
    found: list[Step] = []
    before: str | None = None
    steps = _as_written_there(steps, cache)
    for step in steps:
        made = _choose(step, cache.notes.imported(step.action(before, cache.salt)), cache)
        if made is None:
            break
        found.append(replace(step, uses=made.content["uses"]))
        record = cache.lookup(made)
        if record is None:  # it was removed meanwhile
            break
        before = record.artifact.digest
    return (*found, *steps[len(found) :])


def _as_written_there(steps: Sequence[Step], cache: Cache) -> Sequence[Step]:
    """The steps, with an imported structure's config.json in place of the checkpoint's, if both are equivalent and only
    that one was imported: entries with default values may be present or absent."""
    first = steps[0]
    assert first.source is not None, "a step whose checkpoint is not here is not looked up"
    config = first.source.load["config"]
    written = [config, *(
        each["config"]
        for each in cache.notes.imported_architectures()
        if same_architecture(config, each["config"], each["defaults"])
    )]  # fmt: skip
    for each in written:
        source = replace(first.source, load={**first.source.load, "config": each})
        made = [replace(step, source=source) for step in steps]
        if cache.notes.imported(made[0].action(None, cache.salt)):
            return made
    return steps


def _choose(step: Step, candidates: Sequence[Action], cache: Cache) -> Action | None:
    """Choose among structures made with other versions: one that is still cached, then the closest versions to this
    machine's, then the last import."""

    def fit(candidate: Action) -> tuple[bool, int]:
        same = sum(candidate.content["uses"].get(name) == version for name, version in step.uses.items())
        return cache.lookup(candidate) is not None, same

    whole = [each for each in candidates if set(each.content["uses"]) == set(step.implementation.uses)]
    return max(reversed(whole), key=fit, default=None)


def notes_for(chains: Mapping[str, Sequence[Step]]) -> list[str]:
    """The plan's notes on chains with steps that cannot run here. chains: submodel -> steps."""
    lacking = {name: [step for step in steps if step.lacks] for name, steps in chains.items()}
    imported = {name: steps for name, steps in lacking.items() if steps and all(step.has_key for step in steps)}
    if not imported:
        return []
    steps = [step for each in imported.values() for step in each]
    used: dict[str, set[str]] = {}
    for step in steps:
        for package, version in step.uses.items():
            used.setdefault(package, set()).add(version)
    made_with = ", ".join(_spelled(package, versions) for package, versions in sorted(used.items()))
    absent = sorted({package for step in steps for package in step.lacks})
    return [
        f"{', '.join(imported)}: the structures were imported, made with {made_with}; "
        f"not installed here: {', '.join(absent)}"
    ]


def _spelled(package: str, versions: Collection[str]) -> str:
    here = found_version(package)
    other = f" (here {here})" if here is not None and {here} != {*versions} else ""
    return f"{package} {' and '.join(sorted(versions))}{other}"


def why_not_here(step: Step) -> str:
    """Why a step that is not cached cannot run on this machine, in a few words."""
    what = "its structure is not here" if step.weights == "symbolic" else "it is not cached"
    return f"{what}, and {', '.join(step.lacks)} {'are' if len(step.lacks) > 1 else 'is'} not installed"


def not_here(steps: Sequence[Step], targets: Mapping[str, str]) -> UsageError:
    """The error for steps that are not cached and cannot run here. targets: pipeline -> its target."""
    missing = sorted({package for step in steps for package in step.lacks})
    structures = [step for step in steps if step.weights == "symbolic"]
    install = how_to_install(*missing)
    if len(structures) < len(steps):
        carried = next(step for step in steps if step.weights != "symbolic")
        return lacks(
            f"{carried.id} {carried.name} is not cached. It reads the weights themselves, and",
            missing,
            f"Build it on a machine that has them ({install}). `sdflow plan` says why the chain carries its weights.",
        )
    named: dict[tuple[str, str], list[str]] = {}
    for step in structures:
        name = _architecture(step) or "WORKFLOW.yaml"
        named.setdefault((name, targets[step.pipeline]), []).append(step.submodel)
    which = "; ".join(
        f"{', '.join(dict.fromkeys(submodels))} of {'this architecture' if name.endswith('.yaml') else name} for {target}"
        for (name, target), submodels in named.items()
    )
    names, built_for = (",".join(dict.fromkeys(each[part] for each in named)) for part in (0, 1))
    return lacks(
        f"these structures are not in the cache: {which}. Making them here",
        missing,
        f"On a machine that has them: sdflow cache export --structures {names} --target {built_for} FILE; here: "
        f"sdflow cache import FILE. Or {install}.",
    )


def _architecture(step: Step) -> str | None:
    """The shipped architecture whose submodel has this step's config; None if there is none."""
    assert step.source is not None, "a step whose checkpoint is not here was not looked up"
    config = step.source.load["config"]
    part = part_of(step.source.load, step.submodel)
    for name in FAMILIES[step.family].architectures:
        with suppress(OSError):  # an architecture without such a component
            if config_digest({**architecture_config(name, part.component), **part.config}) == config_digest(config):
                return name
    return None
