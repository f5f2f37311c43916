"""Merge one workflow over another, and a target's changes over a workflow: like any YAML trees, with one exception.

Over a submodel's `passes`, a list of steps, a map from pass name to options changes, removes or inserts single steps,
so that nobody repeats a chain to change one option. Insertions are applied first, so a step can be inserted next to one
that the same map removes, which replaces it. Insertions may refer to one another, in any order; several at the same
place keep the order in which they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, expect_kind, is_null, text_of
from sdflow.config.workflow import Mark

Path = tuple[str, ...]

BEFORE, AFTER = "insert_before", "insert_after"
INSERTING = (BEFORE, AFTER)


@dataclass(frozen=True)
class Insertion:
    """A step to add to a chain, and the step that it goes next to."""

    name: str
    step: YamlMap
    place: str
    anchor: str
    mark: Mark

    @property
    def words(self) -> str:
        return f"to insert {self.name} {self.place.removeprefix('insert_')}"


def pass_name(step: Node) -> str | None:
    """The name of a step's pass; None if the step is malformed."""
    return text_of(step.entries.get("pass")) if isinstance(step, YamlMap) else None


def names_of(chain: YamlList) -> list[str]:
    """The names of the passes of a chain, without malformed steps."""
    return [name for name in map(pass_name, chain.items) if name]


def patch_chain(
    chain: YamlList,
    patch: YamlMap,
    problems: Problems,
    *,
    lenient: bool = False,
    where: str = "",
    gone: Collection[str] = (),
) -> YamlList:
    """Return the chain with new steps inserted and the options of `patch` merged into the named steps; null removes a
    step.

    lenient: ignore changes to missing steps; an insertion always needs its anchor. where: " for cuda", for messages.
    gone: steps that may be removed even if missing.
    """
    insertions, changes = [], {}
    for name, options in patch.entries.items():
        check_change(name, options, problems)
        if (found := insertion_of(name, options, patch.keys[name])) is not None:
            insertions.append(found)
        else:
            changes[name] = options
    steps = _insert(list(chain.items), insertions, problems, where)
    for name, options in changes.items():
        if name not in map(pass_name, steps):
            if not lenient and not (is_null(options) and name in gone) and not _places(options):
                _tell_missing(name, options, patch.keys[name], steps, problems, where)
        elif is_null(options):
            steps = [step for step in steps if pass_name(step) != name]
        elif isinstance(options, YamlMap):
            # The step keeps the place where it was written; each option has its own.
            steps = [_patched(step, options, problems) if pass_name(step) == name else step for step in steps]
    return YamlList(tuple(steps), chain.mark)


def patch_each(
    chains: Mapping[str, YamlList], patch: YamlMap, problems: Problems, *, where: str = "", gone: Collection[str] = ()
) -> dict[str, YamlList]:
    """Apply to every chain the parts of `patch` that match it: changes to its steps, insertions next to them.

    Parts that match no chain are problems.
    """
    found = {name: _applicable(chain, patch) for name, chain in chains.items()}
    used = {key for each in found.values() for key in each.entries}
    known = [name for chain in chains.values() for name in names_of(chain)]
    for name, options in patch.entries.items():
        if name in used or (is_null(options) and name in gone):
            continue
        check_change(name, options, problems)
        insertion = insertion_of(name, options, patch.keys[name])
        if insertion is None:
            problems.add(patch.keys[name], f"no chain{where} has a step {name!r} to change", nearest(name, known))
        else:
            text = f"no chain{where} has a step {insertion.anchor!r} {insertion.words}"
            problems.add(insertion.mark, text, nearest(insertion.anchor, known))
    return {name: patch_chain(chains[name], each, problems, where=where) for name, each in found.items()}


def check_change(name: str, options: Node, problems: Problems) -> None:
    """Report mistakes in a change to a step or in an insertion that do not depend on the chain."""
    if not isinstance(options, YamlMap):
        if not is_null(options):
            expect_kind(options, "a map of options, or null", f"the change to {name}", problems)
        return
    if "pass" in options.entries:
        problems.add(options.keys["pass"], "a change cannot replace a step's pass", "replace the list of passes")
    given = _places(options)
    for key in given:
        anchor = options.entries[key]
        if text_of(anchor) is None:
            expect_kind(anchor, "the name of a pass in the chain", f"`{key}`", problems)
    if len(given) > 1:
        problems.add(
            options.keys[given[1]], f"{name} cannot have both `{BEFORE}` and `{AFTER}`", "leave one of them out"
        )


def _places(options: Node) -> list[str]:
    """The keys of INSERTING with a value, valid or not."""
    entries = options.entries if isinstance(options, YamlMap) else {}
    return [key for key in INSERTING if key in entries and not is_null(entries[key])]


def insertion_of(name: str, options: Node, mark: Mark) -> Insertion | None:
    """The step that an entry of the map inserts, if any. mark: of its name."""
    if not isinstance(options, YamlMap):
        return None
    for place in INSERTING:
        anchor = options.entries.get(place)
        if isinstance(anchor, YamlScalar) and isinstance(anchor.value, str):
            entries = {"pass": YamlScalar(name, mark), **without_places(options).entries}
            return Insertion(
                name, YamlMap(entries, {**options.keys, "pass": mark}, mark), place, anchor.value, anchor.mark
            )
    return None


def without_places(options: YamlMap) -> YamlMap:
    """The options of a step without the insertion keys."""
    return YamlMap(
        {key: each for key, each in options.entries.items() if key not in INSERTING}, options.keys, options.mark
    )


def _insert(steps: list[Node], insertions: list[Insertion], problems: Problems, where: str) -> list[Node]:
    """Return the steps with the new ones inserted."""
    waiting = []
    for each in insertions:
        there = next((step for step in steps if pass_name(step) == each.name), None)
        if there is None:
            waiting.append(each)
        else:
            instead = f"to change its options, leave out {each.place}; for a second one, write the chain as a list"
            problems.add(
                each.step.mark, f"the chain{where} already has a step {each.name!r}, from {there.mark}", instead
            )
    behind: dict[str, Node] = {}  # anchor -> the step that this map inserted after it last
    while ready := [each for each in waiting if each.anchor in map(pass_name, steps)]:
        each = ready[0]
        waiting.remove(each)
        places = [index for index, step in enumerate(steps) if pass_name(step) == each.anchor]
        if each.place == BEFORE:
            index = places[0]
        else:
            last = behind.get(each.anchor, steps[places[-1]])
            index = next(index for index, step in enumerate(steps) if step is last) + 1
            behind[each.anchor] = each.step
        steps = [*steps[:index], each.step, *steps[index:]]
    names = [name for name in map(pass_name, steps) if name]
    for each in waiting:
        remedy: str | None
        if each.anchor in {other.name for other in waiting}:
            text = f"{each.name} and {each.anchor} are each inserted next to the other"
            remedy = f"insert one of them next to a step of the chain: {', '.join(names)}"
        else:
            text = f"the chain{where} has no step {each.anchor!r} {each.words}"
            remedy = nearest(each.anchor, [*names, *(other.name for other in insertions if other is not each)])
        problems.add(each.mark, text, remedy)
    return steps


def _tell_missing(name: str, options: Node, mark: Mark, steps: list[Node], problems: Problems, where: str) -> None:
    known = [written for written in map(pass_name, steps) if written]
    remedy = nearest(name, known)
    if isinstance(options, YamlMap) and not (remedy or "").startswith("did you mean"):
        remedy = f"{remedy or 'the chain is empty'}; `{BEFORE}` or `{AFTER}` among its options inserts it"
    problems.add(mark, f"the chain{where} has no step {name!r} to change", remedy)


def _applicable(chain: YamlList, patch: YamlMap) -> YamlMap:
    """The parts of a patch whose step or anchor is in the chain."""
    known = set(names_of(chain))
    insertions = [
        found for name, options in patch.entries.items() if (found := insertion_of(name, options, patch.keys[name]))
    ]
    inserted: set[str] = set()
    while more := {each.name for each in insertions if each.anchor in known | inserted} - inserted:
        inserted |= more
    placed = {each.name for each in insertions}
    kept: Callable[[str], bool] = lambda name: name in inserted if name in placed else name in known  # noqa: E731
    return YamlMap({name: each for name, each in patch.entries.items() if kept(name)}, patch.keys, patch.mark)


def _patched(step: Node, options: YamlMap, problems: Problems) -> Node:
    merged = merge_documents(step, without_places(options), problems)
    assert isinstance(step, YamlMap) and isinstance(merged, YamlMap)
    return YamlMap({**merged.entries, "pass": step.entries["pass"]}, merged.keys, step.mark)


def merge_documents(
    base: Node,
    over: Node,
    problems: Problems,
    *,
    lenient: bool = False,
    where: str = "",
    gone: Mapping[str, Collection[str]] = MappingProxyType({}),
    path: Path = (),
) -> Node:
    """Merge `over` over `base`, workflows or parts of them at `path`: maps at every depth, changes into chains; other
    lists, and scalars, including null, replace. lenient, where: see `patch_chain`; gone: by submodel."""
    if _is_chain(path) and isinstance(base, YamlList) and isinstance(over, YamlMap):
        return patch_chain(base, over, problems, lenient=lenient, where=where, gone=gone.get(path[-2], ()))
    if not (isinstance(base, YamlMap) and isinstance(over, YamlMap)):
        return over
    entries = dict(base.entries)
    for key, value in over.entries.items():
        if key in entries:
            further = (*path, key)
            value = merge_documents(
                entries[key], value, problems, lenient=lenient, where=where, gone=gone, path=further
            )
        entries[key] = value
    return YamlMap(entries, {**base.keys, **over.keys}, over.mark)


def _is_chain(path: Path) -> bool:
    if path[:1] == ("targets",):
        path = path[2:]
    return len(path) == 3 and path[0] == "submodels" and path[2] == "passes"


def overlay(
    workflow: YamlMap,
    changes: YamlMap,
    problems: Problems,
    *,
    inherited: bool,
    where: str = "",
    gone: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> YamlMap:
    """Apply a target's changes to the workflow: first `passes` in every submodel that has them, then the rest.

    inherited: ignore changes to missing steps, since a base's changes are for many chains; a workflow's own are
    problems.
    where, gone: see `merge_documents`.
    """
    result: Node = workflow
    everywhere = changes.entries.get("passes")
    if isinstance(everywhere, YamlMap):
        found = chains_of(workflow)
        ignored = Problems()
        every = {name for each in gone.values() for name in each}
        patched = patch_each(found, everywhere, ignored if inherited else problems, where=where, gone=every)
        result = _with_chains(workflow, patched)
    rest = {key: value for key, value in changes.entries.items() if key in ("submodels", "evaluate", "verify")}
    keys = {key: changes.keys[key] for key in rest}
    over = YamlMap(rest, keys, workflow.mark)
    result = merge_documents(result, over, problems, lenient=inherited, where=where, gone=gone)
    assert isinstance(result, YamlMap)
    return result


def chains_of(workflow: YamlMap) -> dict[str, YamlList]:
    """The chains written as lists, by submodel."""
    submodels = workflow.entries.get("submodels")
    named = submodels.entries if isinstance(submodels, YamlMap) else {}
    found = {name: each.entries.get("passes") for name, each in named.items() if isinstance(each, YamlMap)}
    return {name: chain for name, chain in found.items() if isinstance(chain, YamlList)}


def _with_chains(workflow: YamlMap, chains: dict[str, YamlList]) -> YamlMap:
    submodels = workflow.entries.get("submodels")
    if not isinstance(submodels, YamlMap):
        return workflow
    entries = dict(submodels.entries)
    for name, chain in chains.items():
        submodel = entries[name]
        assert isinstance(submodel, YamlMap), "as chains_of found it"
        entries[name] = YamlMap({**submodel.entries, "passes": chain}, submodel.keys, submodel.mark)
    changed = YamlMap(entries, submodels.keys, submodels.mark)
    return YamlMap({**workflow.entries, "submodels": changed}, workflow.keys, workflow.mark)
