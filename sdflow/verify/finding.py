"""What a check found: where, what, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["error", "warning", "note"]
LEVELS: tuple[str, ...] = get_args(Level)
"""The gravest first."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say.

    submodel: "unet"; empty for the pipeline as a whole. check: which check, in one word ("kernel", "digest").
    level: "error" fails the verification; "warning" is what could not be established or may be slow; "note" is neither.
    node: the node, tensor, port or file; the first one where several share the finding. count: how many share it.
    """

    submodel: str
    check: str
    level: Level
    node: str
    what: str
    remedy: str
    count: int = 1

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.submodel, self.node) if part)
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{where}{more}: {self.what}" + (f": {self.remedy}" if self.remedy else "")


def errors(findings: list[Finding]) -> list[Finding]:
    """Those that fail the verification."""
    return [finding for finding in findings if finding.level == "error"]
