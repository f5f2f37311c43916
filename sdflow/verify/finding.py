"""Findings of checks: where, what, and what to do about it; and grouping of equal ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["error", "warning", "note"]
LEVELS: tuple[str, ...] = get_args(Level)
"""In order of severity."""

_TYPE = re.compile(r"(b?float|fp|u?int)\d+\W*")
_NAMED = re.compile(r"\d|\w[./]\w|^/")
"""Matches names of tensors, nodes and files, and counts: words with a digit, or with a dot or slash within."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    submodel: "unet"; empty for the whole pipeline. check: the check in one word ("kernel", "digest").
    level: "error" fails the verification; "warning" is an open question or may be slow; "note" is neither.
    node: the node, tensor, port or file; the first one if the finding covers several. count: how many it covers.
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


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that fail the verification."""
    return [finding for finding in findings if finding.level == "error"]


@dataclass(frozen=True)
class Kind:
    """Findings of one check and level that differ only in names and numbers: a row of a report."""

    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def counts(self) -> dict[str, int]:
        """Submodel -> number of places in it."""
        counts = dict.fromkeys((finding.submodel for finding in self.findings), 0)
        for finding in self.findings:
            counts[finding.submodel] += finding.count
        return counts

    @property
    def where(self) -> str:
        """The first place in each submodel and the number of others: "text_encoder Attention_0 and 11 more, unet
        Gelu_0"."""
        first = {finding.submodel: finding.node for finding in reversed(self.findings)}
        return ", ".join(
            " ".join(filter(None, (submodel, first[submodel], f"and {count - 1} more" if count > 1 else "")))
            for submodel, count in self.counts.items()
        )


def kinds(findings: Iterable[Finding]) -> list[Kind]:
    """Group the findings by kind, ordered by first occurrence."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.level, finding.check, _words(finding.what, finding.node)), []).append(finding)
    return [Kind(tuple(each)) for each in found.values()]


def _words(text: str, node: str) -> str:
    """The text without names and numbers. float16 and float32 count as words."""
    if node:
        text = text.replace(node, "*")
    return " ".join(
        "*" if _NAMED.search(word.rstrip(".,;:)")) and not _TYPE.fullmatch(word) else word for word in text.split()
    )
