"""Integrity check of the base model that BindWeights copies from, while it copies.

The data file is hashed, unless page sums are recorded for its digest; these hold while the file's stat is unchanged
(`sdflow.store.stat_cache`). Sums still check every byte read, at a twentieth of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdflow.artifact import WEIGHTS_FILE, Record
from sdflow.disk.file_stamp import Stamp, check_stamps, file_stamp
from sdflow.store.stat_cache import Known, StatCache, stamp_identity
from sdflow.weights.stream import PAGE_SUMS


@dataclass(frozen=True)
class ComparedBase:
    """A base, and the expected sha256 and, if known, sums of its data file. stamp: of the file, taken before the
    lookup. All three are None for a model without a data file."""

    record: Record
    stamp: Stamp | None = None
    sha256: str | None = None
    sums: str | None = None

    def check(self) -> None:
        """Check after reading. Raises InputChanged if the file changed since the lookup."""
        if self.stamp is not None:
            check_stamps([self.stamp])

    def remember(self, sums: str | None, stats: StatCache) -> None:
        """Record the sums of a file whose digest was verified. None: the recorded ones were wrong."""
        if self.stamp is not None:
            path = self.record.artifact.path / WEIGHTS_FILE
            stats.remember([Known(path, PAGE_SUMS, stamp_identity(self.stamp), sums or "")])


def compared_base(record: Record, stats: StatCache) -> ComparedBase | None:
    """How to check a base; None if its file is gone."""
    artifact = record.artifact
    sha256 = next((entry.sha256 for entry in artifact.files if entry.path == WEIGHTS_FILE), None)
    if sha256 is None:
        return ComparedBase(record)
    path = artifact.path / WEIGHTS_FILE
    try:
        stamp = file_stamp(path)
    except FileNotFoundError:
        return None
    return ComparedBase(record, stamp, sha256, stats.recall(path, PAGE_SUMS, stamp_identity(stamp)) or None)
