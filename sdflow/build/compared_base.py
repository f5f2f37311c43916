"""What the model that a bind copies from is compared with while it is copied.

Its data file is hashed, unless the sums of its pages are known: they were noted beside its digest, and hold while the file's
stat is the same (`sdflow.store.stat_cache`). Then each byte that is read is compared all the same, at a twentieth of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdflow.artifact import WEIGHTS_FILE, Record
from sdflow.disk.file_stamp import Stamp, check_stamps, file_stamp
from sdflow.store.stat_cache import Known, StatCache, stamp_identity
from sdflow.weights.stream import PAGE_SUMS


@dataclass(frozen=True)
class ComparedBase:
    """A base, and what its data file must have: sha256 and, if they are known, the sums. stamp: from before they were
    looked up. All three are None for a model without a data file."""

    record: Record
    stamp: Stamp | None = None
    sha256: str | None = None
    sums: str | None = None

    def check(self) -> None:
        """Once it was read. Raises InputChanged if the file is no longer the one that the sums or the digest are of."""
        if self.stamp is not None:
            check_stamps([self.stamp])

    def remember(self, sums: str | None, stats: StatCache) -> None:
        """Note the sums of the file that was found to have its digest. None: those that were noted were wrong."""
        if self.stamp is not None:
            path = self.record.artifact.path / WEIGHTS_FILE
            stats.remember([Known(path, PAGE_SUMS, stamp_identity(self.stamp), sums or "")])


def compared_base(record: Record, stats: StatCache) -> ComparedBase | None:
    """How a base is compared; None if its file is gone by now."""
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
