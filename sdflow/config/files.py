"""Read a workflow file and all files that it extends."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePath

from sdflow.artifact import INDEX_FILE
from sdflow.config.fields import WORKFLOW
from sdflow.config.nodes import MAX_BYTES, decode, parse
from sdflow.config.patch import chains_of, merge_documents, names_of, overlay
from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, expect_kind, text_of
from sdflow.config.workflow import Mark
from sdflow.disk.input_file import alike, is_regular, is_there, open_input
from sdflow.disk.shipped import shipped_workflow, shipped_workflows
from sdflow.manifest import MANIFEST_FILE
from sdflow.sources.reference import FILE_SUFFIXES, PICKLE_SUFFIXES

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w][\w./-]*)?", re.ASCII)
"""owner/name, as on the hub."""

_ZIP = b"PK\x03\x04"

_MAX_EXTENDS = 32  # depth of a chain of `extends`
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class _Source:
    """One file: its own content, and the files that it extends."""

    bases: tuple[Path, ...]
    own: YamlMap


class Files:
    """The files of one workflow, and the trees that they merge to.

    A file overrides everything that it extends, including their changes for targets: its general settings and then its
    settings for a target are merged over its bases' tree for that target.

    folders: file name as in marks -> folder that relative paths in the file start from.
    read: every file that was read, in order, resolved.
    """

    def __init__(self, problems: Problems, shared: Files | None = None) -> None:
        """shared: the files of another workflow, which are not read again."""
        self.problems = problems
        self.folders: dict[str, Path] = {} if shared is None else shared.folders
        self.read: list[Path] = []
        self._root: Path | None = None
        self._sound = True
        self._sources: dict[Path, _Source] = {} if shared is None else shared._sources
        self._trees: dict[tuple[Path, str | None], YamlMap] = {}

    def load(self, path: Path, asked: Mark | None = None) -> YamlMap:
        """The workflow at `path` without a target. asked: the place that names it; None for the command line.

        Raises WorkflowError if any of its files cannot be read.
        """
        self._root = self._read(path, asked or Mark(str(path), 0, 0), ())
        self.problems.check()
        tree = self._tree(self._loaded(), None)
        self._sound = not len(self.problems)
        return tree

    def for_target(self, target: str) -> YamlMap:
        """The loaded workflow with one target's changes. It is an error there to change a step that the target
        removes."""
        return self._tree(self._loaded(), target)

    def check_targets(self) -> Problems:
        """Problems in the workflow's own `targets`: changes to steps that do not exist. Files that it extends may have
        more."""
        found, path = Problems(), self._loaded()
        targets = self._sources[path].own.entries.get("targets")
        gone = {name: names_of(chain) for name, chain in chains_of(self._tree(path, None)).items()}
        for target, changes in targets.entries.items() if isinstance(targets, YamlMap) else ():
            if isinstance(changes, YamlMap):
                overlay(self._layered(path, target), changes, found, inherited=False, where=_for(target), gone=gone)
        return found

    def _loaded(self) -> Path:
        assert self._root is not None, "what cannot be read is a problem"
        return self._root

    def _tree(self, path: Path, target: str | None) -> YamlMap:
        """A file's tree with its changes for a target. Problems common to all targets are reported once."""
        key = (path, target)
        if key not in self._trees:
            tree = self._layered(path, target)
            targets = self._sources[path].own.entries.get("targets")
            changes = targets.entries.get(target) if isinstance(targets, YamlMap) and target is not None else None
            if isinstance(changes, YamlMap):
                tree = overlay(tree, changes, self._problems_of(target), inherited=True, where=_for(target))
            self._trees[key] = tree
        return self._trees[key]

    def _layered(self, path: Path, target: str | None) -> YamlMap:
        """A file merged over its bases for a target, without the file's own changes for that target."""
        source = self._sources[path]
        tree: Node = YamlMap({}, {}, source.own.mark)
        for layer in (*(self._tree(base, target) for base in source.bases), source.own):
            tree = merge_documents(
                tree, layer, self._problems_of(target), lenient=target is not None, where=_for(target)
            )
        assert isinstance(tree, YamlMap)
        return tree

    def _problems_of(self, target: str | None) -> Problems:
        """The collector for a target's tree; problems of the tree without a target are not reported again."""
        return self.problems if target is None or self._sound else Problems()

    def folder(self, mark: Mark) -> Path:
        """The folder that relative paths at this place start from: the file's, or the current one for `--set`."""
        return self.folders.get(mark.file) or Path.cwd()

    def found(self, reference: str, mark: Mark) -> Path:
        """The workflow that a reference at this place names, resolved as for `extends`."""
        return _found(self.folder(mark), reference)

    def _read(self, path: Path, asked: Mark, above: tuple[Path, ...]) -> Path | None:
        """Read the file and those that it extends, unless already read. None if one cannot be read."""
        try:
            resolved = path.resolve()
            if resolved in above:
                chain = " -> ".join(file.name for file in (*above[above.index(resolved) :], resolved))
                self.problems.add(asked, f"files extend each other in a circle: {chain}")
                return None
            if resolved in self._sources:
                return resolved
            if len(above) >= _MAX_EXTENDS:
                self.problems.add(asked, f"more than {_MAX_EXTENDS} files extend one another")
                return None
            found = None if asked.line else not_a_file(path)
            if found is None:
                with open_input(path) as file:
                    data = file.read(MAX_BYTES + 1)
                found = None if asked.line else weights(path, data)
            if found is not None:
                self.problems.add(asked, *found)
                return None
        except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the path; RuntimeError: a link loop
            self._report_unreadable(path, asked, error)
            return None
        self.read.append(resolved)
        self.folders[str(path)] = resolved.parent
        root = self._parse(data, path, asked)
        if root is None:
            return None
        bases = self._bases(root, path, (*above, resolved))
        own = YamlMap({key: node for key, node in root.entries.items() if key != "extends"}, root.keys, root.mark)
        self._sources[resolved] = _Source(bases, own)
        return resolved

    def _parse(self, data: bytes, path: Path, asked: Mark) -> YamlMap | None:
        """The tree of a file. Problems within it are reported only if it is a workflow or named on the command line:
        messages must not quote other files."""
        found = Problems()
        text = decode(data, str(path), found)
        root = parse(text, str(path), found) if text is not None else None
        known = any(key in WORKFLOW for key in root.entries) if isinstance(root, YamlMap) else _has_key(data)
        if isinstance(root, YamlMap) and (known or not root.entries or not asked.line):
            self.problems.extend(found)
            return root
        if root is None and (known or not asked.line):
            self.problems.extend(found)
        else:
            what, place = (repr(str(path)), asked) if asked.line else ("this", Mark(str(path), 1, 1))
            remedy = "A workflow is a YAML file with keys like model, target and submodels."
            self.problems.add(place, f"{what} is not a workflow" if data.strip() else f"{what} is empty", remedy)
        return None

    def _report_unreadable(self, path: Path, asked: Mark, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            what = "there is no such file" if asked.file == str(path) else f"there is no file {str(path)!r}"
            self.problems.add(asked, what, nearest_sibling(path, workflow=True))
        else:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.problems.add(asked, f"cannot read {str(path)!r}: {reason}")

    def _bases(self, root: YamlMap, path: Path, above: tuple[Path, ...]) -> tuple[Path, ...]:
        extends = root.entries.get("extends", YamlList((), root.mark))
        bases = []
        for reference in extends.items if isinstance(extends, YamlList) else (extends,):
            if (written := text_of(reference)) is not None:
                bases.append(self._read(_found(path.parent, written), reference.mark, above))
            else:
                expect_kind(reference, "a YAML file or a list of them", "`extends`", self.problems)
        return tuple(base for base in bases if base is not None)


def _for(target: str | None) -> str:
    """A suffix for nouns in messages."""
    return f" for {target}" if target is not None else ""


def _has_key(data: bytes) -> bool:
    """Whether a line begins with a key of workflows, in any encoding."""
    lines = data.replace(b"\0", b"").splitlines()
    return any(
        line.partition(b":")[0].strip(b" \"'").decode("ascii", "replace") in WORKFLOW for line in lines if b":" in line
    )


def _found(folder: Path, reference: str) -> Path:
    written = Path(os.path.normpath(folder / reference))
    return written if is_there(written) else shipped_workflow(reference) or written


def workflow_file(path: Path) -> Path:
    """The file that a command's argument names: a path, or the name of a shipped workflow such as sd15."""
    if path.suffix or is_regular(path):
        return path
    name = path.as_posix()
    return shipped_workflow(f"base/{name}.yaml") or shipped_workflow(f"{name}.yaml") or path


def nearest_sibling(path: Path, *, workflow: bool = False) -> str | None:
    """A remedy for a missing path: the most similar name in its folder, or the missing folder.

    workflow: the path should name a workflow, possibly a shipped one.
    """
    try:
        if path.parent.name == "base" and (shipped := nearest(f"base/{path.name}", shipped_workflows())):
            return shipped
        ships = alike(path.name, (PurePath(name).stem for name in shipped_workflows())) if workflow else None
        if workflow and shipped_workflow(f"base/{path.stem}.yaml") is not None:
            ships = path.stem
        if not path.parent.is_dir():
            missing = f"there is no folder {str(path.parent)!r} either"
            return missing if ships is None else f"{missing}; {ships!r} ships with sdflow"
        names = sorted(each.name for each in path.parent.iterdir())
        found = alike(path.name, (name for name in names if name.lower().endswith(_SUFFIXES) == workflow))
        return f"did you mean {found!r}?" if found else ships and f"did you mean {ships!r}, which ships with sdflow?"
    except (OSError, ValueError):
        return None


def not_a_file(path: Path) -> tuple[str, str] | None:
    """Why a command's argument is not a readable workflow file, and what to do with it instead; None if unknown."""
    written = shlex.quote(str(path))
    if path.is_dir():
        if (path / MANIFEST_FILE).is_file():
            return (
                "this is a built pipeline, not a workflow",
                f'Generate with it: sdflow generate {written} --prompt "..."',
            )
        if (path / INDEX_FILE).is_file():
            return "this is a model, not a workflow", _init(written)
        return None
    if not is_there(path) and not is_there(path.parent) and (repository := hub_repository(path.as_posix())):
        return "this is not a file, and a hub repository is not a workflow", _init(f"hf:{repository}")
    return None


def weights(path: Path, start: bytes) -> tuple[str, str] | None:
    """The same for a weight file, recognized by its suffix or the magic bytes of safetensors, GGUF and PyTorch
    archives."""
    length = int.from_bytes(start[:8], "little")
    begins = start.startswith((_ZIP, b"GGUF")) or (start[8:9] == b"{" and 2 <= length < 1 << 40)
    if not begins and path.suffix.lower() not in (*FILE_SUFFIXES, *PICKLE_SUFFIXES):
        return None
    return "this is a file of weights, not a workflow", _init(shlex.quote(str(path)))


def _init(model: str) -> str:
    return f"Write a workflow for it: sdflow init --model {model}"


def hub_repository(text: str) -> str | None:
    """The hub repository that a text names: hf:owner/name, or without hf: unless it looks like a file."""
    name = text.removeprefix("hf:")
    if REPOSITORY.fullmatch(name) is None:
        return None
    looks_like_file = name.lower().endswith((".yaml", ".yml", *FILE_SUFFIXES, *PICKLE_SUFFIXES))
    return None if looks_like_file and name == text else name
