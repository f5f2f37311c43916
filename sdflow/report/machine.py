"""Output of `sdflow passes`, `sdflow targets` and `sdflow doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sdflow.report.output import print_json, print_table

if TYPE_CHECKING:
    from sdflow.doctor import Finding


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """What the doctor found, the remedies below the table."""
    if as_json:
        print_json("doctor", {"findings": [asdict(finding) for finding in findings]})
        return
    print_table("", ("", "subject", "what"), [(f.level, f.subject, f.what) for f in findings])
    for finding in findings:
        if finding.level != "ok":
            print(f"{finding.level}: {finding.subject}: {finding.what}\n  {finding.remedy}")
