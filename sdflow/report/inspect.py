"""Output of `sdflow inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdflow.inspection import Description
from sdflow.report.output import print_json, put


def print_inspection(described: Sequence[Description], *, as_json: bool = False) -> None:
    """Each description as lines of name and value, then workflow lines; or everything as JSON."""
    if as_json:
        print_json("inspect", {"findings": [each.to_json() for each in described]})
        return
    for number, each in enumerate(described):
        if number:
            put("")
        _print_one(each)


def _print_one(description: Description) -> None:
    known = {
        "kind": description.kind,
        "for" if description.kind == "LoRA" else "of": " or ".join(description.of),
        "architecture": description.architecture,
        "precision": description.precision,
        **description.details,
        "missing": ", ".join(description.missing),
    }
    shown = {name: _spelled(value) for name, value in known.items() if value not in (None, "", (), {})}
    width = max(map(len, shown))
    put(description.path, *(f"  {name:<{width}}  {value}" for name, value in shown.items()))
    put(*(f"  {note}" for note in description.notes))
    if description.workflow:
        put("", "  # a workflow for it", *(f"  {line}" for line in description.workflow.splitlines()), wrap=False)
    if description.command:
        put("", f"  {description.command}", wrap=False)


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)
