"""A self-test report for people: its tables, for pages and terminals, and its two files."""

from __future__ import annotations

from html import escape
from pathlib import Path

from sdflow.disk.atomic_write import require_makable, write_whole
from sdflow.errors import UsageError, os_errors_as
from sdflow.page import document, images, section, text_table
from sdflow.selftest import result
from sdflow.selftest.result import Report
from sdflow.units import spell_bytes, spell_seconds

Rows = list[tuple[str, ...]]

PARTS = ("submodel", "nodes", "fallback", "median ms", "load s")
IMAGES = ("prompt", "PSNR vs PyTorch", "structure", "content", "")
_KINDS = {"passed": "good", "unavailable": "warn"}
_SENTENCES = {
    "passed": "This hardware generates the same images as PyTorch on the CPU.",
    "failed": "Images differ from PyTorch's on the CPU, or some nodes ran on another provider.",
    "unavailable": "The target is not available on this machine.",
    "broken": "The sample could not be built or did not run.",
}


def about(report: Report) -> list[tuple[str, str]]:
    """The machine, and overall figures."""
    found = [("target", report.target), ("provider", report.provider or "none")]
    found += [(key, str(value)) for key, value in report.device.items() if value is not None and "bytes" not in key]
    memory = report.device.get("memory_bytes")
    if isinstance(memory, int):
        found.append(("memory", spell_bytes(memory)))
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())))
    if report.build_seconds is not None:
        found.append(("built in", spell_seconds(report.build_seconds)))
    if report.image_ms is not None:
        first = "" if report.first_image_ms is None else f"; the first one {report.first_image_ms:.0f} ms"
        found.append((f"time per image, {report.steps} steps", f"{report.image_ms:.1f} ms{first}"))
    if report.peak_memory_bytes is not None:
        found.append(("peak process memory", spell_bytes(int(report.peak_memory_bytes))))
    return found + [("note", note) for note in report.notes]


def part_rows(report: Report) -> Rows:
    """Rows of `PARTS`."""
    return [
        (
            name,
            ", ".join(f"{count} on {provider}" for provider, count in part.nodes.items()),
            str(len(part.fallen)),
            "" if part.median_ms is None else f"{part.median_ms:.2f}",
            f"{part.load_seconds:.1f}",
        )
        for name, part in report.submodels.items()
    ]


def image_rows(report: Report) -> Rows:
    """Rows of `IMAGES`."""
    return [
        (
            pair.prompt,
            f"{pair.decibels:.1f} dB" if pair.decibels < 200 else "equal",
            f"SSIM {pair.ssim:.4f}",
            "matches the prompt" if pair.shows else "does not match the prompt",
            "" if pair.shows == pair.shown_by_pytorch else "unlike PyTorch's",
        )
        for pair in report.images
    ]


def page(report: Report) -> str:
    """The whole document. All text of the report is escaped, since it may be untrusted."""
    fallen = [(name, *node) for name, part in report.submodels.items() for node in part.fallen]
    drawn = [
        shown
        for pair in report.images
        for shown in ((f"{report.target}: {pair.prompt}", pair.png), ("PyTorch on the CPU", pair.pytorch_png))
    ]
    ran = text_table(PARTS, part_rows(report), PARTS[2:])
    sections = [
        f"<pre>{escape(report.reason)}</pre>" if report.reason else "",
        section("Images", images(drawn), text_table(IMAGES, image_rows(report))) if drawn else "",
        section("Node placement and speed", ran) if report.submodels else "",
        section("Nodes on another provider", text_table(("submodel", "node", "operator", "provider"), fallen))
        if fallen
        else "",
    ]
    verdict = report.verdict, _KINDS.get(report.verdict, "bad")
    title = f"Self-test of {report.target}"
    return document(title, verdict, _SENTENCES[report.verdict], about(report), sections)


def report_files(wanted: Path) -> tuple[Path, Path]:
    """The files of `--report FILE`, with or without .json or .html. Raises UsageError if they cannot be written."""
    stem = wanted.with_suffix("") if wanted.suffix in (".json", ".html") else wanted
    files = (stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html"))
    for path in files:
        if path.is_dir():
            raise UsageError("is a folder", where=str(path), remedy="Name a file with --report.")
    with os_errors_as("cannot be written", f"--report {wanted}"):
        require_makable(stem.absolute().parent)
    return files


def write_report(report: Report, files: tuple[Path, Path]) -> None:
    """Write both files, each atomically. Raises UsageError."""
    for path, content in zip(files, (result.document(report), page(report).encode()), strict=True):
        with os_errors_as("cannot be written", path):
            write_whole(path, content)
