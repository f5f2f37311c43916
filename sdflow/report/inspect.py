"""What `sdflow inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdflow.inspection import Finding
from sdflow.report.output import print_json


def print_findings(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Each as lines of a name and a value, then lines for a workflow; or everything as JSON."""
    if as_json:
        print_json("inspect", {"findings": [each.to_json() for each in findings]})
        return
    print("\n\n".join(_text(each) for each in findings))


def _text(finding: Finding) -> str:
    told = {
        "kind": finding.kind,
        "for" if finding.kind == "LoRA" else "of": " or ".join(finding.of),
        "architecture": finding.architecture,
        "precision": finding.precision,
        **finding.details,
        "missing": ", ".join(finding.missing),
    }
    shown = {name: _spelled(value) for name, value in told.items() if value not in (None, "", (), {})}
    width = max(map(len, shown))
    lines = [finding.path, *(f"  {name:<{width}}  {value}" for name, value in shown.items())]
    lines += [f"  {note}" for note in finding.notes]
    if finding.workflow:
        lines += ["", "  # a workflow for it", *(f"  {line}" for line in finding.workflow.splitlines())]
    if finding.command:
        lines += ["", f"  {finding.command}"]
    return "\n".join(lines)


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)
