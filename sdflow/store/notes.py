"""Notes that help later runs and affect no result: last action and last failure of a step, and imported actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import digest_json
from sdflow.errors import CacheError
from sdflow.store.layout import FULL, READ_ONLY, Layout, log, reading, replace_file, writing
from sdflow.store.locks import held
from sdflow.store.records import BadRecord, dump, load, read_record


@dataclass(frozen=True)
class Failure:
    action: Action
    at: str  # UTC, ISO 8601
    error: str  # at most MOST_SAID characters


MOST_SAID = 4000


class Notes:
    """The notes of a cache. Steps and failures are not noted on a read-only or full disk."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def remember_step(self, step_id: str, action: Action) -> None:
        """Note the action of a step such as "sd15_cuda/unet/2" for `explain`, and delete its failure."""
        failure = self._path(step_id, "-failed")
        if failure.exists():
            note(self._layout, lambda: failure.unlink(missing_ok=True), "the end of a failure")
        if self.last_action(step_id) != action:
            self._remember(self._path(step_id), step=step_id, action=action.content)

    def last_action(self, step_id: str) -> Action | None:
        body = self._body(self._path(step_id), step_id, "action")
        return None if body is None else Action(body["action"])

    def remember_failure(self, step_id: str, action: Action, error: str) -> None:
        """Note a failure for `explain`. It is neither a result nor part of a key."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path = self._path(step_id, "-failed")
        self._remember(path, step=step_id, action=action.content, at=at, error=error[:MOST_SAID])

    def last_failure(self, step_id: str) -> Failure | None:
        """Return the step's last failure since it was last built, or None if there is none or it is unknown."""
        body = self._body(self._path(step_id, "-failed"), step_id, "action", "at", "error")
        return None if body is None else Failure(Action(body["action"]), body["at"], body["error"])

    def _path(self, step_id: str, suffix: str = "") -> Path:
        return self._layout.steps / f"{digest_json(step_id)}{suffix}.json"

    def _body(self, path: Path, step_id: str, *keys: str) -> dict[str, Any] | None:
        try:
            body = load(read_record(path))
        except (OSError, BadRecord) as error:
            log.debug("no notes on %s: %s", step_id, error)
            return None
        return body if body.get("step") == step_id and all(key in body for key in keys) else None

    def _remember(self, path: Path, **body: Any) -> None:
        def write() -> None:
            self._layout.ensure()
            self._write(path, **body)

        note(self._layout, write, "the last action of a step, or its failure")

    def note_imported(self, actions: Iterable[Action], architectures: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add actions built elsewhere for `imported` to find, and JSON about their architectures. Raises CacheError."""
        self._layout.ensure()
        with writing(self._layout.root), held(self._layout.lock("imported")):
            for action in actions:
                known = [each.content for each in self.imported(action) if each != action]
                self._write(self._of_any_versions(action), actions=[*known, action.content])
            there = self.imported_architectures()
            if more := [dict(each) for each in architectures if each not in there]:
                self._write(self._architectures, architectures=[*there, *more])

    def imported(self, action: Action) -> list[Action]:
        """Return the imported actions that differ from this one only in package versions, the latest import last. Keys
        include the versions of a pass's packages, so a machine without those packages takes the versions noted here."""
        actions = map(Action, self._noted(self._of_any_versions(action), "actions"))
        return [each for each in actions if _without_versions(each) == _without_versions(action)]

    def imported_architectures(self) -> list[dict[str, Any]]:
        return self._noted(self._architectures, "architectures")

    def _noted(self, path: Path, key: str) -> list[dict[str, Any]]:
        """Return a list from a note; empty if the note is damaged: the user imports the structure again."""
        with reading(self._layout.root):
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

    def _of_any_versions(self, action: Action) -> Path:
        return self._layout.imported / f"{digest_json(_without_versions(action))}.json"


def _without_versions(action: Action) -> dict[str, Any]:
    return {name: value for name, value in action.content.items() if name != "uses"}


def note(layout: Layout, write: Callable[[], None], what: str, without: Set[int] = READ_ONLY | FULL) -> bool:
    """Write an optional note. Returns False on errors in `without`: a read-only or full disk still serves hits."""
    try:
        with writing(layout.root):
            write()
    except CacheError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in without:
            log.info("%s was not recorded: %s", what, error.what)
            return False
        raise
    return True
