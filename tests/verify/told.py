"""What a finding must tell: its level, its check, its place, and the names and numbers that matter; not its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sdflow.verify.finding import Finding


@dataclass(frozen=True)
class Told:
    """One finding. what, do: words that must stand in what it says and in its remedy, as whole words.

    count: how many nodes share it.
    """

    level: str
    check: str
    submodel: str
    node: str
    what: tuple[str, ...] = ()
    do: tuple[str, ...] = ()
    count: int = 1

    def missing(self, finding: Finding) -> list[str]:
        """What the finding does not tell of this."""
        wanted = (self.level, self.check, self.submodel, self.node, self.count)
        found = (finding.level, finding.check, finding.submodel, finding.node, finding.count)
        lacks = [f"{a!r}, not {b!r}" for a, b in zip(wanted, found, strict=True) if a != b]
        for words, text in ((self.what, finding.what), (self.do, finding.remedy)):
            lacks += [f"{word!r} in {text!r}" for word in words if not _stands(word, text)]
        return lacks


def _stands(word: str, text: str) -> bool:
    """Whether the word is in the text, and not as a part of a longer word or number."""
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w]|[.,]\w)", text) is not None


def assert_told(findings: Sequence[Finding], *expected: Told) -> None:
    """Each finding tells what is expected of it, in order; there are no others, and each says something."""
    assert len(findings) == len(expected), [str(finding) for finding in findings]
    for finding, told in zip(findings, expected, strict=True):
        assert not told.missing(finding), (str(finding), told.missing(finding))
        assert finding.what
        assert finding.remedy or not told.do
