"""What `sdflow inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdflow.inspection import Description
from sdflow.printable import printable
from sdflow.report.output import print_json


def print_inspection(described: Sequence[Description], *, as_json: bool = False) -> None:
    """Each as lines of a name and a value, then lines for a workflow; or everything as JSON."""
    if as_json:
        print_json("inspect", {"findings": [each.to_json() for each in described]})
        return
    print(printable("\n\n".join(_text(each) for each in described)))


def _text(description: Description) -> str:
    told = {
        "kind": description.kind,
        "for" if description.kind == "LoRA" else "of": " or ".join(description.of),
        "architecture": description.architecture,
        "precision": description.precision,
        **description.details,
        "missing": ", ".join(description.missing),
    }
    shown = {name: _spelled(value) for name, value in told.items() if value not in (None, "", (), {})}
    width = max(map(len, shown))
    lines = [description.path, *(f"  {name:<{width}}  {value}" for name, value in shown.items())]
    lines += [f"  {note}" for note in description.notes]
    if description.workflow:
        lines += ["", "  # a workflow for it", *(f"  {line}" for line in description.workflow.splitlines())]
    if description.command:
        lines += ["", f"  {description.command}"]
    return "\n".join(lines)


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)
