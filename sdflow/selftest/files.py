"""The two files of a report: JSON for programs, a page for people."""

from __future__ import annotations

from pathlib import Path

from sdflow.disk.atomic_write import require_makable, write_whole
from sdflow.errors import UsageError, os_errors_as
from sdflow.selftest.html import page
from sdflow.selftest.result import Report, document


def report_files(wanted: Path) -> tuple[Path, Path]:
    """The files for `--report FILE`, FILE with or without .json or .html. Raises UsageError where none can be written."""
    stem = wanted.with_suffix("") if wanted.suffix in (".json", ".html") else wanted
    files = (stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html"))
    for path in files:
        if path.is_dir():
            raise UsageError("is a folder", where=str(path), remedy="Name a file with --report.")
    with os_errors_as("cannot be written", f"--report {wanted}"):
        require_makable(stem.absolute().parent)
    return files


def write_report(report: Report, files: tuple[Path, Path]) -> None:
    """Write both, each whole. Raises UsageError."""
    for path, content in zip(files, (document(report), page(report).encode()), strict=True):
        with os_errors_as("cannot be written", path):
            write_whole(path, content)
