"""Findings that say the same of several places: what a report shows in one row, with the places folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TYPE = re.compile(r"(b?float|fp|u?int)\d+\W*")
_NAMED = re.compile(r"\d|\w[./]\w|^/")
"""What names a tensor, a node, a file, or counts: a word with a digit in it, or with a dot or a slash within."""


@dataclass(frozen=True)
class Kind:
    """Findings of one check and level whose words are equal but for the names and numbers in them."""

    findings: tuple[Mapping[str, Any], ...]

    @property
    def level(self) -> str:
        return str(self.findings[0]["level"])

    @property
    def check(self) -> str:
        return str(self.findings[0]["check"])

    @property
    def what(self) -> str:
        """What the first of them says."""
        return str(self.findings[0]["what"])

    @property
    def remedy(self) -> str:
        """What to do about the first of them."""
        return str(self.findings[0]["remedy"])

    @property
    def count(self) -> int:
        """How many places there are."""
        return sum(finding["count"] for finding in self.findings)

    @property
    def where(self) -> str:
        """The first place in each submodel, and how many more: "text_encoder Attention_0 and 11 more, unet Gelu_0"."""
        counts: dict[str, int] = {}
        first: dict[str, str] = {}
        for finding in self.findings:
            counts[finding["submodel"]] = counts.get(finding["submodel"], 0) + finding["count"]
            first.setdefault(finding["submodel"], finding["node"])
        return ", ".join(
            " ".join(filter(None, (submodel, first[submodel], f"and {count - 1} more" if count > 1 else "")))
            for submodel, count in counts.items()
        )


def kinds(findings: Iterable[Mapping[str, Any]]) -> list[Kind]:
    """The findings, those of a kind together; in the order of the first of each."""
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for finding in findings:
        words = _words(finding["what"], finding["node"])
        found.setdefault((finding["level"], finding["check"], words), []).append(finding)
    return [Kind(tuple(each)) for each in found.values()]


def _words(text: str, node: str) -> str:
    """The text without what is a name or a number in it. float16 and float32 are words."""
    if node:
        text = text.replace(node, "*")
    return " ".join(
        "*" if _NAMED.search(word.rstrip(".,;:)")) and not _TYPE.fullmatch(word) else word for word in text.split()
    )
