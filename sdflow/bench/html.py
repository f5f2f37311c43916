"""A run as one self-contained page: tables and plots (inline SVG)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from sdflow.bench.result import BenchResult, Measurement
from sdflow.bench.table import HEADS, SHORT, TEXTS, about, by_median, short_table, table
from sdflow.bench.timing import STAGES
from sdflow.page import document, folded, plot, section, text_table
from sdflow.page import table as html_table

WIDTH, ROW, LABEL, VALUE = 720, 24, 190, 130
COLOURS = {"text": "#8da0cb", "step": "#4477aa", "decoder": "#66c2a5", "rest": "#bbbbbb"}
WRONG = "#cc3311"
LINES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#000000")


def page(result: BenchResult) -> str:
    """The whole document."""
    sections = []
    for index, case in enumerate(result.cases):
        sections.append(section(escape(str(case)), latencies(result, index), _table(result, index)))
    if len(result.cases) > 1:
        sections.append(section("Images per second over the sweep", throughput(result)))
    left_out = [[each.name, each.status, each.reason or ""] for each in result.engines if each.reason]
    if left_out:
        sections.append(section("Not measured", text_table(("engine", "", "why"), left_out)))
    verdict, sentence = _verdict(result)
    told = [pair for pair in about(result) if pair[0] != "measured"]
    described = ", ".join(str(each) for name in ("name", "model", "target") if (each := result.pipeline.get(name)))
    facts = [("pipeline", described), *(pair for pair in told if pair[0] == "device")]
    sections.append(section("Measured on", text_table(("", ""), told)))
    title = f"{result.pipeline['name']}: engines side by side"
    return document(title, verdict, sentence, facts, sections, date=f"{result.time[:16].replace('T', ' ')} UTC")


def _verdict(result: BenchResult) -> tuple[tuple[str, str], str]:
    """Whether images are right, and the fastest engine with a right image in the first case."""
    medians = {engine.name: found.image.median_ms for engine, found in by_median(result, 0) if found.verdict != "WRONG"}
    sentence = "No engine was measured."
    if medians:
        name, (fastest, *others) = next(iter(medians)), medians.values()
        sentence = f"{name} is the fastest, {fastest:,.1f} ms per call"
        sentence += f", {others[0] / fastest:.2f} times as fast as the next." if others else "."
    if result.wrong:
        return ("WRONG images", "bad"), f"From {', '.join(result.wrong)}. {sentence}"
    checked = any(found is not None and found.check is not None for each in result.measured for found in each.cases)
    return (("right", "good") if checked else ("not checked", "warn")), sentence


def _table(result: BenchResult, index: int) -> str:
    """The engines, fastest first: a summary, with all figures folded."""
    rows = list(table(result, index))
    wrong = {number: "wrong" for number, row in enumerate(rows) if "WRONG" in row}

    def made(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        numbers = [name for name in columns if name not in TEXTS]
        return html_table(columns, [[escape(cell) for cell in row] for row in rows], numbers, rows=wrong)

    return made(SHORT, short_table(result, index)) + folded("all figures", made(HEADS, rows))


def latencies(result: BenchResult, index: int) -> str:
    """A bar per engine: its median, split into text, steps and decoder; the line extends to p90."""
    found = [(engine.name, measured) for engine, measured in by_median(result, index)]
    if not found:
        return "<p>No engine was measured.</p>"
    scale = (WIDTH - LABEL - VALUE) / max(measured.image.p90_ms for _, measured in found)
    shapes = []
    for row, (name, measured) in enumerate(found):
        wrong, top = measured.verdict == "WRONG", row * ROW + 4
        x = float(LABEL)
        for stage, width in _widths(measured):
            colour = WRONG if wrong else COLOURS[stage]
            shapes.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width * scale:.1f}" height="{ROW - 8}" fill="{colour}">'
                f"<title>{stage}: {width:.2f} ms</title></rect>"
            )
            x += width * scale
        p90 = LABEL + measured.image.p90_ms * scale
        middle = top + (ROW - 8) / 2
        shapes += [
            f'<line x1="{x:.1f}" x2="{p90:.1f}" y1="{middle}" y2="{middle}" stroke="#222"/>',
            f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
            f'<text x="{p90 + 6:.1f}" y="{middle + 4}">{measured.image.median_ms:,.1f} ms{" WRONG" if wrong else ""}</text>',
        ]
    height = len(found) * ROW + 24
    legend = "".join(
        f'<rect x="{LABEL + 110 * place}" y="{height - 14}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{LABEL + 110 * place + 14}" y="{height - 5}">{stage}</text>'
        for place, (stage, colour) in enumerate(COLOURS.items())
    )
    return plot(f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(shapes)}{legend}</svg>')


def _widths(measured: Measurement) -> Iterator[tuple[str, float]]:
    """Stages of the median image in milliseconds, scaled down if separately measured ones exceed it."""
    stages = {
        stage: latency.mean_ms * (latency.runs / measured.stages["text"].runs)
        for stage in STAGES
        if (latency := measured.stages.get(stage)) is not None
    }
    whole, total = measured.image.median_ms, sum(stages.values())
    shrink = min(1.0, whole / total) if total else 0.0
    yield from ((stage, value * shrink) for stage, value in stages.items())
    yield "rest", max(0.0, whole - total * shrink)


def throughput(result: BenchResult) -> str:
    """Images per second of each engine by case; wrong ones as crosses."""
    points = {
        each.name: [(place, found) for place, found in enumerate(each.cases) if found is not None]
        for each in result.measured
    }
    rates = [found.images_per_second for row in points.values() for _, found in row]
    if not rates:
        return "<p>No engine was measured.</p>"
    height, left, bottom = 300, 60, 60
    across = (WIDTH - left - 160) / max(1, len(result.cases) - 1)
    up = (height - bottom - 10) / max(rates)
    shapes = [f'<line x1="{left}" x2="{WIDTH - 150}" y1="{height - bottom}" y2="{height - bottom}" stroke="#222"/>']
    for place, case in enumerate(result.cases):
        anchor = f'x="{left + place * across:.1f}" y="{height - bottom + 16 + 14 * (place % 2)}"'
        shapes.append(f'<text {anchor} text-anchor="middle">{escape(str(case))}</text>')
    for part in (0.5, 1.0):
        y = height - bottom - max(rates) * part * up
        shapes.append(f'<line x1="{left}" x2="{WIDTH - 150}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{max(rates) * part:.3g}</text>')
    for number, (name, row) in enumerate(points.items()):
        colour = LINES[number % len(LINES)]
        places = [
            (left + place * across, height - bottom - found.images_per_second * up, found) for place, found in row
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, found in places:
            mark = "✕" if found.verdict == "WRONG" else "●"
            fill = WRONG if found.verdict == "WRONG" else colour
            shapes.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="{fill}">{mark}</text>')
        shapes.append(f'<text x="{WIDTH - 140}" y="{20 + 18 * number}" fill="{colour}">{escape(name)}</text>')
    return plot(f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(shapes)}</svg>')
