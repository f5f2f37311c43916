"""How one YAML tree is laid over another: maps merge, everything else replaces.

One place is special: the `passes` of a submodel. Laid over a list of steps, a map from pass name to options changes the
steps of that name (null removes them), so that a target's overlay need not repeat a chain to change one option.
"""

from __future__ import annotations

from sdflow.config.nodes import Node, YamlList, YamlMap, YamlScalar, describe
from sdflow.config.problems import Problems, nearest
from sdflow.config.workflow import Mark

Path = tuple[str, ...]


def merge(base: Node, over: Node) -> Node:
    """`over` laid upon `base`: maps merge at every depth, lists and scalars (null too) replace."""
    if not (isinstance(base, YamlMap) and isinstance(over, YamlMap)):
        return over
    entries = dict(base.entries)
    for key, value in over.entries.items():
        entries[key] = merge(entries[key], value) if key in entries else value
    return YamlMap(entries, {**base.keys, **over.keys}, over.mark)


def merge_documents(base: Node, over: Node, problems: Problems, *, lenient: bool = False, path: Path = ()) -> Node:
    """`merge` for a workflow, or a part of one at `path`, in which chains of passes can be patched.

    lenient: a patch may name a pass that the chain does not have; it then changes nothing.
    """
    if _is_chain(path) and isinstance(base, YamlList) and isinstance(over, YamlMap):
        return patch_chain(base, over, problems, lenient=lenient)
    if not (isinstance(base, YamlMap) and isinstance(over, YamlMap)):
        return over
    entries = dict(base.entries)
    for key, value in over.entries.items():
        if key in entries:
            value = merge_documents(entries[key], value, problems, lenient=lenient, path=(*path, key))
        entries[key] = value
    return YamlMap(entries, {**base.keys, **over.keys}, over.mark)


def _is_chain(path: Path) -> bool:
    if path[:1] == ("targets",):
        path = path[2:]
    return len(path) == 3 and path[0] == "submodels" and path[2] == "passes"


def pass_name(step: Node) -> str | None:
    """The pass that a step names, or None where it is not written as it should be."""
    named = step.entries.get("pass") if isinstance(step, YamlMap) else None
    return named.value if isinstance(named, YamlScalar) and isinstance(named.value, str) else None


def patch_chain(chain: YamlList, patch: YamlMap, problems: Problems, *, lenient: bool) -> YamlList:
    """The chain with the options of `patch` merged into the steps of their names; null removes those steps."""
    steps: list[Node] = list(chain.items)
    for name, options in patch.entries.items():
        present = [pass_name(step) for step in steps]
        if name not in present:
            if not lenient:
                known = [written for written in present if written]
                problems.add(patch.keys[name], f"the chain has no step {name!r} to change", nearest(name, known))
        elif isinstance(options, YamlScalar) and options.value is None:
            steps = [step for step, written in zip(steps, present, strict=True) if written != name]
        elif isinstance(options, YamlMap):
            # The step keeps the place where it was written; each option has its own.
            steps = [
                _patched(step, options) if written == name else step
                for step, written in zip(steps, present, strict=True)
            ]
        check_change(name, options, problems)
    return YamlList(tuple(steps), chain.mark)


def check_change(name: str, options: Node, problems: Problems) -> None:
    """Reports a change to a step that is neither a map of options nor null."""
    if isinstance(options, YamlMap):
        if "pass" in options.entries:
            problems.add(options.keys["pass"], "a change cannot make a step another pass", "replace the list of passes")
    elif not (isinstance(options, YamlScalar) and options.value is None):
        expect_kind(options, "a map of options, or null", f"the change to {name}", problems)


def _patched(step: Node, options: YamlMap) -> Node:
    merged = merge(step, options)
    assert isinstance(step, YamlMap) and isinstance(merged, YamlMap)
    return YamlMap({**merged.entries, "pass": step.entries["pass"]}, merged.keys, step.mark)


def overlay(workflow: YamlMap, changes: YamlMap) -> YamlMap:
    """The workflow with the changes for a target: `passes` in every submodel that has them first, then the rest.

    Changes to steps that a chain does not have change nothing.
    """
    result: Node = workflow
    everywhere = changes.entries.get("passes")
    submodels = workflow.entries.get("submodels")
    if isinstance(everywhere, YamlMap) and isinstance(submodels, YamlMap):
        chains: dict[str, Node] = {
            name: _at(changes.mark, "passes", everywhere)
            for name, submodel in submodels.entries.items()
            if isinstance(submodel, YamlMap) and isinstance(submodel.entries.get("passes"), YamlList)
        }
        keys = {name: submodels.keys[name] for name in chains}
        shared = _at(submodels.mark, "submodels", YamlMap(chains, keys, submodels.mark))
        result = merge_documents(result, shared, Problems(), lenient=True)
    rest = {key: value for key, value in changes.entries.items() if key in ("submodels", "evaluate", "verify")}
    keys = {key: changes.keys[key] for key in rest}
    result = merge_documents(result, YamlMap(rest, keys, workflow.mark), Problems(), lenient=True)
    assert isinstance(result, YamlMap)
    return result


def _at(mark: Mark, key: str, value: Node) -> YamlMap:
    return YamlMap({key: value}, {key: mark}, mark)


def expect_kind(node: Node, kind: str, what: str, problems: Problems) -> None:
    """Reports that `what` should have been written as `kind`."""
    problems.add(node.mark, f"{what} must be {kind}, found {describe(node)}")
