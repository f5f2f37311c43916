"""The report of a verification as one self-contained HTML page, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from sdflow.disk.atomic_write import write_whole
from sdflow.errors import os_errors_as
from sdflow.page import document, folded, listed, plot, section, table
from sdflow.page import images as show
from sdflow.tolerances import EXACT_AT_MOST, EXACT_LIMIT, FLOAT16_RATIO, FLOAT32_AT_MOST, FLOAT32_LIMIT
from sdflow.verify.check import Verified
from sdflow.verify.ensemble import PREFIX
from sdflow.verify.finding import LEVELS, Kind, kinds
from sdflow.verify.images import AMPLIFIED
from sdflow.verify.report.rows import (
    DEVICES,
    NUMBERS,
    OUTPUTS,
    SUBMODELS,
    Rows,
    device_rows,
    output_rows,
    submodel_rows,
)
from sdflow.verify.result import CaseDistance, ImageVerdict, SubmodelVerdict, Verification


def write_reports(verified: Verified, folder: Path) -> Path:
    """Write `<name>.verify.html` and `<name>.verify.json` into `folder`. Returns the page's path."""
    result = verified.result
    _replace(folder / f"{result.name}.verify.json", json.dumps(result.to_json(), indent=1).encode())
    page = folder / f"{result.name}.verify.html"
    write_html(verified, page)
    return page


def write_html(verified: Verified, path: Path) -> None:
    """Write the page, atomically."""
    _replace(path, page(verified.result, verified.images).encode())


def _replace(path: Path, content: bytes) -> None:
    with os_errors_as("cannot be written", path):
        write_whole(path, content)


def page(result: Verification, images: Mapping[str, bytes]) -> str:
    """The whole page. images: file name -> PNG."""
    coverage = listed(escape(line) for line in [*result.coverage, *_not_covered(result)])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    artifacts = listed(f"{escape(name)} <small>{escape(digest)}</small>" for name, digest in result.artifacts.items())
    problems = len(result.problems)
    tuned, on_device = device_rows(result)
    sentence = (
        f"Every submodel matches the PyTorch model within its limit, for target {result.target}."
        if result.passed
        else f"{problems} problem{'s' if problems > 1 else ''}, listed below with remedies."
    )
    facts = [
        ("target", result.target),
        ("level", f"{result.level}, {result.seconds:g} s{', from the cache' if result.cached else ''}"),
        ("versions", versions),
    ]
    sections = [
        _problems(result),
        section("Submodels", _coloured(SUBMODELS, submodel_rows(result))),
        _images(result, images),
        *(_steps(part) for part in result.submodels.values()),
        section("Outputs", _coloured(OUTPUTS, output_rows(result)), _LEGEND),
        section(f"With the provider's own kernels{escape(tuned)}", _coloured(DEVICES, on_device)) if on_device else "",
        _findings(result),
        _operators(result),
        section("Coverage", coverage),
        section("Cases", *(_cases(part) for part in result.submodels.values())),
        section("Artifacts", artifacts),
    ]
    verdict = ("passed", "good") if result.passed else ("FAILED", "bad")
    return document(f"Verification of {result.name}", verdict, sentence, facts, sections)


WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 720, 260, 70, 30, 40, 16
MOST_LABELS = 12  # of steps, below the plot

_LEGEND = (
    '<p class="soft">Distance: relative L2 from the fp32 PyTorch model. Ratio: the distance divided by plain fp16 PyTorch\'s, as '
    f"the root mean square over cases. Limits: a ratio of {FLOAT16_RATIO} for float16 artifacts; a distance of "
    f"{FLOAT32_LIMIT:.0e} for float32 ones, or {FLOAT32_AT_MOST:.0e} in cases where fp16 PyTorch loses much. Unrounded: the "
    "distance of a float16 artifact run in float32 with its weights before rounding, in its worst case; at most "
    f"{EXACT_LIMIT:.0e}, or {EXACT_AT_MOST:.0e} where fp16 PyTorch loses much.</p>"
)


def _coloured(columns: Sequence[str], rows: Rows) -> str:
    """A table whose last column holds verdicts."""
    cells = [(*map(escape, row[:-1]), _verdict(row[-1])) for row in rows]
    return table((*columns[:-1], "verdict"), cells, NUMBERS)


def _verdict(words: str) -> str:
    return f'<span class="{"failed" if words == "FAILED" else "passed"}">{escape(words)}</span>'


def _problems(result: Verification) -> str:
    if result.passed:
        return ""
    found = listed(
        f'<b>{escape(where)}</b>: {escape(what)}<br><span class="remedy">{escape(remedy)}</span>'
        for where, what, remedy in result.problems
    )
    gone = [
        f"{escape(part.name)}: {len(part.block.gone)} blocks before the first that differs were not compared: "
        f"their outputs were fused<br><small>{escape(', '.join(part.block.gone))}</small>"
        for part in result.submodels.values()
        if part.block and part.block.gone
    ]
    return section("Problems", found, listed(gone))


def _steps(part: SubmodelVerdict) -> str:
    """The error along the denoising steps, for a submodel that runs in each."""
    steps = [case for case in part.cases if case.group == "trajectory" and case.step is not None]
    if len(steps) < 2:
        return ""
    limit = FLOAT16_RATIO if part.precision == "float16" else None
    return section(
        f"{escape(part.name)} along the denoising steps",
        plot(_plot_of(steps, limit)),
        '<p class="soft">Relative L2 distance.</p>',
    )


def _plot_of(steps: Sequence[CaseDistance], ratio: float | None) -> str:
    """An SVG plot of distances over the steps, with a logarithmic axis. ratio: add a line at this multiple of fp16
    PyTorch's."""
    lines = {
        "artifact": ("#0b57d0", [case.distance for case in steps]),
        "fp16 PyTorch": ("#8a8a8a", [case.yardstick for case in steps]),
    }
    if ratio is not None:
        lines[f"{ratio:g} times fp16 PyTorch"] = ("#b00020", [ratio * case.yardstick for case in steps])
    values = [value for _, line in lines.values() for value in line if 0 < value < math.inf]
    if not values:
        return "<p>There is no finite distance to plot.</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def point(index: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * index / max(1, len(steps) - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="12" font-family="sans-serif">']
    for power in range(low, high + 1):
        _, y = point(0, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index, case in list(enumerate(steps))[:: math.ceil(len(steps) / MOST_LABELS)]:
        x, _ = point(index, 10.0**low)
        label = f"{case.timestep:.4g}" if case.timestep is not None else str(index + 1)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">timestep</text>')
    for number, (name, (colour, line)) in enumerate(lines.items()):
        points = [point(index, value) for index, value in enumerate(line) if 0 < value < math.inf]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if number == 2 else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points if number < 2]
        parts.append(f'<text x="{LEFT + 10 + 170 * number}" y="{TOP - 3}" fill="{colour}">{name}</text>')
    return "".join(parts) + "</svg>"


def _images(result: Verification, images: Mapping[str, bytes]) -> str:
    meaning = ""
    if result.meaning is not None:
        meaning = f"<p>Content: {result.meaning.artifact:.0%} of {result.meaning.cases} images of the sample's "
        meaning += f"evaluation set match their prompts; {result.meaning.reference:.0%} of PyTorch's do.</p>"
    alone = _image("The image", result.image, images, "")
    return alone + meaning + _image("The image of base and refiner", result.ensemble, images, PREFIX)


def _image(title: str, verdict: ImageVerdict | None, images: Mapping[str, bytes], prefix: str) -> str:
    if verdict is None:
        return ""
    captions = {
        "pytorch": "fp32 PyTorch",
        "artifact": "the artifacts",
        "difference": f"their difference, amplified {AMPLIFIED} times",
    }
    figures = show((caption, images[f"{prefix}{name}.png"]) for name, caption in captions.items())

    def row(name: str, psnr: float | None, ssim: float, largest: float) -> tuple[str, ...]:
        return name, "equal" if psnr is None else f"{psnr:.1f} dB", f"{ssim:.5f}", f"{largest:.2g}"

    rows = [
        row("the artifacts", verdict.psnr, verdict.ssim, verdict.largest_difference),
        row("plain fp16 PyTorch", verdict.float16_psnr, verdict.float16_ssim, verdict.float16_largest_difference),
    ]
    text = f"<p>{escape(verdict.prompt)}; {verdict.steps} steps, {verdict.height}x{verdict.width} pixels, the same latents.</p>"
    figures_of_both = table(("against fp32 PyTorch", "PSNR", "SSIM", "largest difference"), rows)
    words = f"{verdict.quantized}, without a limit" if verdict.quantized else "passed"
    return section(f"{title}: {_verdict('FAILED' if verdict.problems else words)}", text, figures, figures_of_both)


def _findings(result: Verification) -> str:
    if not result.findings:
        return ""
    rows = [
        (
            f'<span class="{kind.first.level}">{kind.first.level}</span>',
            kind.first.check,
            f'{escape(kind.first.what)}<br><span class="remedy">{escape(kind.first.remedy)}</span>',
            f"{sum(kind.counts.values()):,}",
            _places(kind),
        )
        for kind in sorted(kinds(result.findings), key=lambda kind: LEVELS.index(kind.first.level))
    ]
    columns = ("level", "check", "finding and remedy", "places", "where")
    return section("The target and the folder", table(columns, rows, ("places",), wide=("finding and remedy", "where")))


def _places(kind: Kind) -> str:
    """The places of a kind, folded if there are several, with their texts where these differ."""
    shown = {kind.first.remedy}
    lines = []
    for finding in kind.findings:
        line = escape(" ".join(filter(None, (finding.submodel, finding.node))))
        if finding.count > 1:
            line += f" and {finding.count - 1:,} more"
        if finding.what != kind.first.what:
            line += f": {escape(finding.what)}"
        if finding.remedy not in shown:
            shown.add(finding.remedy)
            line += f'<br><span class="remedy">{escape(finding.remedy)}</span>'
        lines.append(line)
    if len(lines) == 1:
        return lines[0]
    summary = ", ".join(f"{escape(name) or 'the pipeline'} {count:,}" for name, count in kind.counts.items())
    return f"<details><summary>{summary}</summary>{listed(lines)}</details>"


def _operators(result: Verification) -> str:
    rows = []
    for part in result.submodels.values():
        counted = sorted(part.operators.items(), key=lambda item: (-item[1], item[0]))
        lowered = ", ".join(f"{name} {count}" for name, count in part.lowered.items()) or "none"
        rows.append((part.name, str(sum(part.operators.values())), ", ".join(f"{n} {c}" for n, c in counted), lowered))
    columns = ("submodel", "nodes", "operators", "lowered")
    return section("Operators, and those lowered for this CPU", table(columns, rows, ("nodes",), wide=columns[2:]))


def _not_covered(result: Verification) -> list[str]:
    parts = result.submodels.values()
    unproved = [f"{part.name}: not verified without rounding: {part.unproved}" for part in parts if part.unproved]
    return unproved + [
        f"{part.name}: not verified, because its shapes are fixed: {', '.join(part.left_out)}"
        for part in parts
        if part.left_out
    ]


def _cases(part: SubmodelVerdict) -> str:
    rows = [
        (escape(case.case), case.group, case.output, f"{case.distance:.2e}", f"{case.yardstick:.2e}")
        for case in part.cases
    ]
    columns = ("case", "group", "output", "distance", "fp16 PyTorch")
    return folded(f"{part.name}: {len(rows)}", table(columns, rows, columns[3:]))
