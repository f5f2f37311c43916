"""Compare a pipeline folder with its checkpoint: the files, then their behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.families import FAMILIES
from sdflow.families.shared.sampler_names import of_each_kind
from sdflow.manifest import read_manifest
from sdflow.runtime.files.folder import SCHEDULER
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import CHECK, REBUILD, compare_folder
from sdflow.verify.folder.schedules import compare_schedules
from sdflow.verify.folder.source import Source
from sdflow.verify.folder.tokenizers import compare_tokenizers, is_tokenizer, texts

VERSION = 2
"""Part of a verification's key. Increase it whenever findings may change."""


@dataclass(frozen=True)
class FolderRequest:
    """What to compare.

    folder: an assembled pipeline. source: its checkpoint's files. whole: all submodels for generating are verified,
    so tokenizers and schedules are run, too.
    """

    folder: Path
    source: Source
    whole: bool


@dataclass(frozen=True)
class Held:
    """The result of comparing a folder with its checkpoint.

    findings: deviations from the checkpoint. coverage: what was compared, in words.
    """

    findings: tuple[Finding, ...]
    coverage: str


def hold_folder(request: FolderRequest, progress: Callable[[str], None]) -> Held:
    """Compare the files and their behaviour. Raises CheckpointError if the checkpoint can no longer be read."""
    progress("the folder's files against the checkpoint's")
    folder, source = request.folder, request.source
    found = list(compare_folder(folder, read_manifest(folder), source))
    coverage = "every file other than the graphs compared with the checkpoint's"
    if not request.whole:
        return Held(tuple(found), coverage)
    progress("tokenizers and schedules against the checkpoint's")
    family = FAMILIES[source.family]
    companions, others = family.companions, of_each_kind(family.noising.schedulers)
    tokenizers = [name for name in source.companions if is_tokenizer(companions[name])]
    for name in tokenizers:
        found += _tried(folder, name, lambda name=name: compare_tokenizers(folder, name, companions[name], source))  # type: ignore[misc]
    found += _tried(folder, SCHEDULER, lambda: compare_schedules(folder, source))
    coverage += (
        f", {len(texts())} texts through {len(tokenizers)} tokenizer{'s' if len(tokenizers) > 1 else ''}, "
        f"its schedule, and {len(others)} other schedulers"
    )
    return Held(tuple(found), coverage)


def _tried(folder: Path, name: str, attempt: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return attempt()
    except CheckpointError as error:
        if error.where != str(folder / name):
            raise
        return [Finding("", CHECK, "error", name, error.what, REBUILD)]
