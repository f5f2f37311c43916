"""Compare a pipeline folder with its provenance: every file that the statement names, by digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sdflow.errors import CacheError, UsageError
from sdflow.manifest.provenance import PROVENANCE_FILE, read_provenance, subjects_of
from sdflow.sources import FileDigests
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import REBUILD

CHECK = "provenance"


def compare_with_provenance(folder: Path, digests: FileDigests) -> Iterator[Finding]:
    """Yield the files that changed since the build. Folders of earlier sdflow versions have no provenance and are
    skipped."""
    try:
        statement = read_provenance(folder)
    except UsageError as error:
        yield Finding("", CHECK, "error", PROVENANCE_FILE, error.what, REBUILD)
        return
    for name, sha256 in subjects_of(statement).items() if statement is not None else ():
        try:
            changed = None if digests.digest(folder / name) == sha256 else "is not the file that was built"
        except FileNotFoundError:
            changed = "is missing"
        except (OSError, CacheError) as error:
            changed = f"cannot be read: {error}"
        if changed is not None:
            yield Finding("", CHECK, "error", name, changed, REBUILD)
