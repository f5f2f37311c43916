"""`--set key=value`: one value of a workflow, given on the command line.

The value is YAML flow style if it begins with a quote, bracket or brace; otherwise the whole text is one plain scalar,
so that `prompt=a cat: sitting` needs only the shell's quoting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdflow.config.fields import WORKFLOW
from sdflow.config.nodes import MAX_DEPTH, parse, plain
from sdflow.config.patch import INSERTING, merge_documents, pass_name, patch_chain
from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, describe, is_null, to_data
from sdflow.config.workflow import Mark
from sdflow.families import any_family


@dataclass(frozen=True)
class Override:
    """A value and its path of keys from the top of the workflow."""

    path: tuple[str, ...]
    value: Node
    mark: Mark

    @property
    def after_overlay(self) -> bool:
        """Whether targets can change the same keys; the override then applies after their changes."""
        return self.path[0] in ("submodels", "evaluate", "verify")


def parse_overrides(texts: Sequence[str], problems: Problems) -> list[Override]:
    """Parse overrides, in order. Their marks name the option as the file."""
    overrides = []
    for text in texts:
        mark = Mark(f"--set {text}", 0, 0)
        key, separator, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not separator or not all(path) or len(path) > MAX_DEPTH // 2:
            problems.add(mark, "not in the form key=value", "for example unet.passes.OnnxConversion.target_opset=16")
            continue
        if path[0] in any_family.submodels():
            path = ("submodels", *path)
        if path[0] in ("extends", "targets"):
            problems.add(
                mark, f"{path[0]!r} cannot be set here", "set submodels or evaluate: that comes after all files"
            )
            continue
        if path[0] not in WORKFLOW:
            known = [name for name in (*WORKFLOW, *any_family.submodels()) if name not in ("extends", "targets")]
            problems.add(mark, f"unknown key {path[0]!r}", nearest(path[0], known))
            continue
        value = _value(written.strip(), mark, problems)
        if value is not None:
            overrides.append(Override(path, value, mark))
    return overrides


def _value(written: str, mark: Mark, problems: Problems) -> Node | None:
    if written[:1] in ("[", "{", "'", '"'):
        return parse(written, mark.file, problems, at=mark)
    return plain(written, mark, problems)


def apply(workflow: YamlMap, overrides: Sequence[Override], problems: Problems) -> YamlMap:
    """Apply the overrides to the workflow, in order."""
    result: Node = workflow
    for override in overrides:
        result = _put(result, override, 0, problems)
    assert isinstance(result, YamlMap)
    return result


def _put(node: Node | None, override: Override, depth: int, problems: Problems) -> Node:
    """Return `node` with the override's value placed at `path[depth:]` below it."""
    path, mark = override.path, override.mark
    if depth == len(path):
        if node is not None and depth == 3 and path[0] == "submodels":
            return merge_documents(node, override.value, problems, path=path)
        return override.value
    if node is None or is_null(node):
        node = YamlMap({}, {}, mark)
    here = ".".join(path[:depth])
    if isinstance(node, YamlMap):
        key = path[depth]
        entries = {**node.entries, key: _put(node.entries.get(key), override, depth + 1, problems)}
        return YamlMap(entries, {key: mark, **node.keys}, node.mark)
    if isinstance(node, YamlScalar):
        problems.add(mark, f"`{here}` is not a map but {describe(node)}")
        return node
    if depth == 3 and path[0] == "submodels" and len(path) > depth + 1 and path[-1] in INSERTING:
        step = YamlMap({path[-1]: override.value}, {path[-1]: mark}, mark)
        name = ".".join(path[depth:-1])
        return patch_chain(node, YamlMap({name: step}, {name: mark}, mark), problems)
    chosen, used = _chosen(node, path[depth:])
    if not chosen:
        names = [name for name in map(pass_name, node.items) if name]
        remedy = nearest(path[depth], names) if names else None
        count = f"{len(node.items)} item{'' if len(node.items) == 1 else 's'}, counted from 0"
        problems.add(mark, f"`{here}` has no {path[depth]!r} ({count})", remedy)
        return node
    items: list[Node] = []
    for index, item in enumerate(node.items):
        if index not in chosen:
            items.append(item)
        elif depth + used < len(path) or to_data(override.value) is not None:  # null removes an item
            items.append(_put(item, override, depth + used, problems))
    return YamlList(tuple(items), node.mark)


def _chosen(node: YamlList, path: tuple[str, ...]) -> tuple[set[int], int]:
    """The items that the path's first parts select, by index or by pass name, and the number of parts used.

    A pass given by its path has dots in its name, so a name may span several parts.
    """
    if path[0].isascii() and path[0].isdigit():
        index = int(path[0][:9])
        return ({index} if index < len(node.items) else set()), 1
    names = [pass_name(item) for item in node.items]
    for used in range(len(path), 0, -1):
        name = ".".join(path[:used])
        if name in names:
            return {index for index, written in enumerate(names) if written == name}, used
    return set(), 1
