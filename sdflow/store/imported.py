"""Actions that were done elsewhere and imported: found by what they do, whatever versions of packages they were done with.

A key holds the versions of the packages that a pass uses. A machine that lacks one of them cannot know the key of such a step;
it takes the versions that are noted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import digest_json
from sdflow.store.layout import Layout, replace_file
from sdflow.store.locks import held
from sdflow.store.records import BadRecord, dump, load, read_record

_VERSIONS = "uses"


def note_imported(layout: Layout, actions: Iterable[Action]) -> None:
    """Note actions whose results were imported. What was noted of others stays."""
    with held(layout.lock("imported"), None, lambda: None):
        for action in actions:
            known = [each for each in noted(layout, action.content) if each != action]
            body = {"format": 1, "actions": [each.content for each in (*known, action)]}
            replace_file(layout, _file(layout, action.content), dump(body))


def note_architectures(layout: Layout, architectures: Iterable[Mapping[str, Any]]) -> None:
    """Note what whoever plans wants to know of the architectures that imported results are of: JSON."""
    with held(layout.lock("imported"), None, lambda: None):
        known = noted_architectures(layout)
        more = [dict(each) for each in architectures if each not in known]
        if more:
            replace_file(layout, _architectures(layout), dump({"format": 1, "architectures": [*known, *more]}))


def noted_architectures(layout: Layout) -> list[dict[str, Any]]:
    """What was noted so."""
    try:
        return list(load(read_record(_architectures(layout)))["architectures"])
    except (FileNotFoundError, NotADirectoryError, BadRecord, KeyError, TypeError):
        return []


def _architectures(layout: Layout) -> Path:
    return layout.imported / "architectures.json"


def noted(layout: Layout, content: Mapping[str, Any]) -> list[Action]:
    """The imported actions that are this one but for versions of packages, the last that was imported at the end."""
    try:
        actions = [Action(each) for each in load(read_record(_file(layout, content)))["actions"]]
    except (FileNotFoundError, NotADirectoryError, BadRecord, KeyError, TypeError):
        return []  # a note that is damaged says nothing: the structure is imported again
    return [each for each in actions if _without(each.content) == _without(content)]


def _file(layout: Layout, content: Mapping[str, Any]) -> Path:
    return layout.imported / f"{digest_json(_without(content))}.json"


def _without(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != _VERSIONS}
