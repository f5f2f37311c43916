"""The tables of a self-test's report, the same on a page and in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sdflow.selftest.result import Report
from sdflow.units import spell_bytes, spell_seconds


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: Callable[[Report], list[tuple[str, ...]]]


def about(report: Report) -> list[tuple[str, str]]:
    """What it was measured on, and the figures of the whole."""
    found = [("target", report.target), ("provider", report.provider or "none")]
    found += [(key, str(value)) for key, value in report.device.items() if value is not None and "bytes" not in key]
    memory = report.device.get("memory_bytes")
    if isinstance(memory, int):
        found.append(("memory", spell_bytes(memory)))
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())))
    if report.build_seconds is not None:
        found.append(("built in", spell_seconds(report.build_seconds)))
    if report.image_ms is not None:
        first = "" if report.first_image_ms is None else f"; the first {report.first_image_ms:.0f} ms"
        found.append((f"an image of {report.steps} steps", f"{report.image_ms:.1f} ms{first}"))
    if report.peak_memory_bytes is not None:
        found.append(("memory of the process", spell_bytes(int(report.peak_memory_bytes))))
    return found + [("note", note) for note in report.notes]


def _parts(report: Report) -> list[tuple[str, ...]]:
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


def _images(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            pair.prompt,
            f"{pair.decibels:.1f} dB" if pair.decibels < 200 else "equal",
            f"SSIM {pair.ssim:.4f}",
            "shows it" if pair.shows else "does not show it",
            "" if pair.shows == pair.shown_by_pytorch else "unlike PyTorch's",
        )
        for pair in report.images
    ]


parts = Table(("submodel", "nodes", "fallen", "median ms", "load s"), _parts)
images = Table(("prompt", "from PyTorch's", "structure", "what it shows", ""), _images)
