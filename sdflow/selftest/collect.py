"""Make a table of results by hardware from submitted self-test reports.

Reports are untrusted files: they are read within limits, and their claims are checked against their images.
"""

from __future__ import annotations

import base64
import io
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sdflow.errors import UsageError
from sdflow.printable import in_one_line
from sdflow.selftest import judged
from sdflow.selftest.result import Report, document, read_report
from sdflow.targets import TARGETS

COLUMNS = ("hardware", "system", "target", "provider", "result", "image", "nearest and farthest image", "versions")

MOST_REPORTS = 2000
MOST_FILES = 20_000
"""Maximum number of names examined in a folder."""
MOST_PIXELS = 512 * 512
"""Maximum pixels of an image; the sample's have 128 x 128."""
LONGEST = 60
"""Maximum characters of a cell from a report."""

_NAMED = ("onnxruntime", "tensorrt", "openvino", "migraphx", "windowsml", "sdflow")


@dataclass(frozen=True)
class LeftOut:
    """A file that is not in the table.

    file: its name below the folder. why: in words.
    """

    file: str
    why: str


@dataclass(frozen=True)
class Collected:
    """The self-test reports of a folder.

    reports: file names and reports, in the table's order. left_out: files that are not reports, or contradict
    themselves.
    """

    reports: tuple[tuple[str, Report], ...]
    left_out: tuple[LeftOut, ...]


def collect(folder: Path) -> Collected:
    """Read every report (`*.json`) in a folder and its subfolders, without following links.

    Raises UsageError if there is no such folder, or no report in it.
    """
    if not folder.is_dir():
        raise UsageError(
            "there is no such folder", where=str(folder), remedy="Name the folder that the reports are in."
        )
    reports: list[tuple[str, Report]] = []
    left_out: list[LeftOut] = []
    seen: dict[bytes, str] = {}
    for path in _files(folder):
        name = in_one_line(path.relative_to(folder).as_posix())
        try:
            if len(reports) == MOST_REPORTS:
                raise ValueError(f"more than {MOST_REPORTS} reports")
            if path.is_symlink():
                raise ValueError("is a link")
            report = _checked(read_report(path))
            if (content := document(report)) in seen:
                raise ValueError(f"is the same as {seen[content]}")
        except (UsageError, ValueError) as error:
            why = error.what if isinstance(error, UsageError) else str(error)
            left_out.append(LeftOut(name, in_one_line(why)[:300]))
        else:
            seen[content] = name
            reports.append((name, report))
    if not reports:
        named = "".join(f"\n    {each.file}: {each.why}" for each in left_out[:8])
        raise UsageError(
            f"it contains no usable report{':' if named else ''}{named}",
            where=str(folder),
            remedy="Put .json files from `sdflow selftest --report` there.",
        )
    order = list(TARGETS)
    reports.sort(key=lambda each: (order.index(each[1].target), hardware(each[1]).lower(), each[0]))
    return Collected(tuple(reports), tuple(left_out))


def row(report: Report) -> tuple[str, ...]:
    """A row of `COLUMNS`."""
    decibels = sorted(pair.decibels for pair in report.images)
    near = (
        ""
        if not decibels
        else " and ".join("equal" if d >= 200 else f"{d:.0f} dB" for d in (decibels[-1], decibels[0]))
    )
    speed = "" if report.image_ms is None else f"{report.image_ms:.0f} ms, {report.steps} steps"
    fallen = sum(len(part.fallen) for part in report.submodels.values())
    result = report.verdict + (f", {fallen} nodes elsewhere" if fallen else "")
    versions = [
        f"{name} {version}" for name, version in report.versions.items() if any(each in name for each in _NAMED)
    ]
    provider = (report.provider or "").removesuffix("ExecutionProvider")
    system = str(report.device.get("system") or "")
    return (
        hardware(report),
        _short(system),
        report.target,
        _short(provider),
        result,
        speed,
        near,
        _short(", ".join(versions), 120),
    )


def hardware(report: Report) -> str:
    """The accelerator, or the processor with its cores."""
    if name := report.device.get("accelerator"):
        return _short(str(name))
    cores = report.device.get("cores")
    return _short(str(report.device.get("processor") or "unknown")) + (
        f", {cores} cores" if isinstance(cores, int) else ""
    )


def markdown(collected: Collected) -> str:
    """The table for the manual. Text from reports is escaped: it makes no links, tags or rows."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(map(_escaped, row(report)))} |" for _, report in collected.reports]
    return "\n".join(lines) + "\n"


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise UsageError(
                    f"it holds more than {MOST_FILES} files",
                    where=str(folder),
                    remedy="Name a folder with only reports.",
                )
            if name.endswith(".json"):
                yield Path(parent, name)


def _checked(report: Report) -> Report:
    """Return the report if its claims hold. Raises ValueError with the reason."""
    if report.target not in TARGETS:
        raise ValueError(f"no target is named {report.target[:LONGEST]!r}")
    if report.verdict not in ("passed", "failed"):
        raise ValueError(f"nothing ran: {report.verdict}")
    known = {provider for provider, _, _ in TARGETS[report.target].providers}
    if report.provider not in known:
        raise ValueError(f"it ran on {str(report.provider)[:LONGEST]!r}, which is not a provider of {report.target}")
    if not report.images or not report.submodels:
        raise ValueError(f"it claims {report.verdict} without an image or a submodel")
    for pair in report.images:
        for png in (pair.png, pair.pytorch_png):
            _require_small(base64.b64decode(png))
    if report.image_ms is not None and not report.steps:
        raise ValueError("it has the time of an image, but not the number of steps")
    reference = [{"png": pair.pytorch_png, "shows": pair.shown_by_pytorch} for pair in report.images]
    drawn = [{"png": p.png, "prompt": p.prompt, "seed": p.seed, "shows": p.shows} for p in report.images]
    try:
        again = judged(replace(report, images=(), reason=None), reference, drawn)
    except (OSError, ValueError, SyntaxError, struct.error) as error:  # what Pillow raises for damaged files
        raise ValueError(f"an image cannot be read: {error}") from error
    if again.verdict != report.verdict:
        raise ValueError(f"it claims {report.verdict}, but by its images and nodes it is {again.verdict}")
    for mine, claimed in zip(again.images, report.images, strict=True):
        if abs(mine.decibels - claimed.decibels) > 0.1:
            raise ValueError(
                f"it claims {claimed.decibels:.1f} dB for an image that is {mine.decibels:.1f} dB from PyTorch's"
            )
    return report


def _require_small(png: bytes) -> None:
    """Raises ValueError for an image that would take much memory, by the size in its first chunk."""
    if len(png) < 24 or png[12:16] != b"IHDR":
        raise ValueError("an image is damaged")
    width, height = struct.unpack(">II", png[16:24])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"an image has {width}x{height} pixels")
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as opened:
        if opened.size != (width, height):
            raise ValueError("an image is damaged")


def _short(text: str, most: int = LONGEST) -> str:
    text = in_one_line(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _escaped(text: str) -> str:
    # Also escapes : . @, since GitHub turns plain URLs, names that begin with www, and mail addresses into links.
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~$&:.@])", lambda found: f"&#{ord(found[1])};", text)
