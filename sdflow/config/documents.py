"""How one workflow is laid over another, and the changes for a target over a workflow.

As any YAML tree, but for one place: over the `passes` of a submodel, a list of steps, a map from pass name to options changes
single steps (`sdflow.config.patch`), so that neither a workflow nor a target need repeat a chain to change one option.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from sdflow.config.patch import patch_chain, patch_each
from sdflow.config.problems import Problems
from sdflow.config.tree import Node, YamlList, YamlMap

Path = tuple[str, ...]


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
    """`over` laid upon `base`, workflows or parts of them at `path`. lenient, where: as of `patch_chain`; gone too, by
    submodel."""
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
    """The workflow with the changes for a target: `passes` in every submodel that has them first, then the rest.

    inherited: a base's changes are for many chains: those to steps that a chain does not have change nothing. In the workflow
    itself they are problems. where, gone: as of `merge_documents`.
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
    """The chains that are written as lists, by submodel."""
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
