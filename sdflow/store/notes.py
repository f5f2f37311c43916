"""What helps later runs but no result needs: the last action of a step, how it failed last, and what was done elsewhere and
imported."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import canonical_json, digest_json
from sdflow.errors import CacheError
from sdflow.store.layout import FULL, READ_ONLY, Layout, log, reading, replace_file, writing
from sdflow.store.locks import held
from sdflow.store.records import BadRecord, dump, load, read_record

Leaf = tuple[str | int, ...]
_DIGEST = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True)
class Failure:
    """A step that failed: what was to be done, when (UTC, ISO 8601), and what the error said, at most MOST_SAID characters."""

    action: Action
    at: str
    error: str


MOST_SAID = 4000


class Notes:
    """The notes of a cache."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def remember_step(self, step_id: str, action: Action) -> None:
        """Note the action of a step such as "sd15_cuda/unet/2", for `explain`, and forget its failure. Skipped on a read-only
        cache."""
        if self._failure(step_id).exists():
            note(self._layout, lambda: self._failure(step_id).unlink(missing_ok=True), "the end of a failure")
        if self.last_action(step_id) == action:
            return

        def write() -> None:
            self._layout.ensure()
            self._write(self._step(step_id), step=step_id, action=action.content)

        note(self._layout, write, "the last action of a step")

    def last_action(self, step_id: str) -> Action | None:
        """The action that the step had when it was last run; None if that is not known."""
        body = self._body(self._step(step_id), step_id, "action")
        return None if body is None else Action(body["action"])

    def remember_failure(self, step_id: str, action: Action, error: str) -> None:
        """Note that a step failed, for `explain`: no result, and part of no key. Skipped on a read-only cache."""

        def write() -> None:
            self._layout.ensure()
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._write(self._failure(step_id), step=step_id, action=action.content, at=at, error=error[:MOST_SAID])

        note(self._layout, write, "the failure of a step")

    def last_failure(self, step_id: str) -> Failure | None:
        """How a step failed since it was last built; None if it did not, or that is not known."""
        body = self._body(self._failure(step_id), step_id, "action", "at", "error")
        return None if body is None else Failure(Action(body["action"]), body["at"], body["error"])

    def _body(self, path: Path, step_id: str, *keys: str) -> dict[str, Any] | None:
        """What was noted of the step, with all of these keys."""
        try:
            body = load(read_record(path))
        except (OSError, BadRecord) as error:
            log.debug("nothing is noted of %s: %s", step_id, error)
            return None
        return body if body.get("step") == step_id and all(key in body for key in keys) else None

    def _step(self, step_id: str) -> Path:
        return self._layout.steps / f"{digest_json(step_id)}.json"

    def _failure(self, step_id: str) -> Path:
        return self._layout.steps / f"{digest_json(step_id)}-failed.json"

    def note_imported(self, actions: Iterable[Action], architectures: Iterable[Mapping[str, Any]] = ()) -> None:
        """Note that these were done elsewhere, so that `imported` finds them, and JSON about their architectures. What was noted
        of others stays. Raises CacheError."""
        self._layout.ensure()
        with writing(self._layout.root), held(self._layout.lock("imported")):
            for action in actions:
                known = [each.content for each in self._imported(action.content) if each != action]
                self._write(self._of_any_versions(action.content), actions=[*known, action.content])
            there = self.imported_architectures()
            if more := [dict(each) for each in architectures if each not in there]:
                self._write(self._architectures, architectures=[*there, *more])

    def imported(self, action: Action) -> list[Action]:
        """The imported actions that are this one but for the versions of packages, the last that was imported at the end.

        A key holds the versions of the packages that a pass uses. A machine that lacks one of them cannot know the key of such a
        step; it takes the versions that are noted here.
        """
        with reading(self._layout.root):
            return self._imported(action.content)

    def imported_architectures(self) -> list[dict[str, Any]]:
        """What was noted of the architectures of imported actions."""
        with reading(self._layout.root):
            return list(self._noted(self._architectures, "architectures"))

    def _imported(self, content: Mapping[str, Any]) -> list[Action]:
        actions = map(Action, self._noted(self._of_any_versions(content), "actions"))
        return [each for each in actions if _without_versions(each.content) == _without_versions(content)]

    def _noted(self, path: Path, key: str) -> list[Any]:
        """A note that is damaged says nothing: the structure is imported again."""
        try:
            found = load(read_record(path))[key]
        except (FileNotFoundError, NotADirectoryError, BadRecord, KeyError):
            return []
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def _write(self, path: Path, **body: Any) -> None:
        replace_file(self._layout, path, dump({"format": 1, **body}))

    @property
    def _architectures(self) -> Path:
        return self._layout.imported / "architectures.json"

    def _of_any_versions(self, content: Mapping[str, Any]) -> Path:
        return self._layout.imported / f"{digest_json(_without_versions(content))}.json"


def _without_versions(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "uses"}


def note(layout: Layout, write: Callable[[], None], what: str, without: Set[int] = READ_ONLY | FULL) -> bool:
    """Write what helps later runs but no result needs. A read-only or a full disk does without, and serves hits. Returns whether
    it is written."""
    try:
        with writing(layout.root):
            write()
    except CacheError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in without:
            log.info("%s is not noted: %s", what, error.what)
            return False
        raise
    return True


def explain(old: Action | None, new: Action) -> tuple[str, ...]:
    """The leaves of the action that differ, such as "option opt_level: 0 -> 1". Empty if the actions are the same."""
    if old is None:
        return ("first build",)
    before, after = dict(_leaves(old.content)), dict(_leaves(new.content))
    lines = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: [str(part) for part in path]):
        if path not in before:
            lines.append(f"{_name(path)}: added, {_words(after[path])}")
        elif path not in after:
            lines.append(f"{_name(path)}: removed, was {_words(before[path])}")
        elif canonical_json(before[path]) != canonical_json(after[path]):  # in Python, 1 == 1.0 == True
            lines.append(f"{_name(path)}: {_words(before[path])} -> {_words(after[path])}")
    return tuple(lines)


def _leaves(value: Any, path: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Maps and lists of maps are walked; scalars, and lists of scalars, are leaves, as are empty maps."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _name(path: Leaf) -> str:
    """What a user calls the leaf."""
    match path:
        case ("pass", "name"):
            return "pass"
        case ("pass", "version"):
            return "version of the pass"
        case ("config", *rest) if rest:
            return f"option {_dotted(rest)}"
        case ("inputs", "loras", int(index), *rest):
            return " ".join(["lora", str(index + 1), _dotted(rest)]).strip()
        case ("inputs", "loras"):
            return "loras"
        case ("inputs", "model"):
            return "output of the step before"
        case ("inputs", "model", "architecture"):
            return "architecture"
        case ("inputs", "checkpoint", *rest):
            return f"checkpoint {_dotted(rest)}".strip()
        case ("inputs", "model", *rest):
            return f"checkpoint {_dotted(rest)}"
        case ("uses", distribution):
            return f"uses {distribution}"
        case ("user_scripts", *rest) if rest:
            return f"user script {_dotted(rest)}"
        case ("format",):
            return "format of the key"
        case _:
            return _dotted(path) or "the action"


def _dotted(parts: Any) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in parts)


def _words(value: Any) -> str:
    if isinstance(value, str):
        if _DIGEST.fullmatch(value):
            return value[:12]
        return value if value and value.isprintable() else repr(value)
    return canonical_json(value).decode()
