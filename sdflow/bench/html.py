"""The run as one page that needs nothing else: tables and plots (inline SVG)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from sdflow.bench.result import BenchResult, Measurement
from sdflow.bench.table import TABLE, about, table
from sdflow.bench.timing import STAGES

WIDTH, ROW, LABEL, VALUE = 720, 24, 190, 130
COLOURS = {"text": "#8da0cb", "step": "#4477aa", "decoder": "#66c2a5", "rest": "#bbbbbb"}
WRONG = "#cc3311"
LINES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#000000")

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 }
th, td { padding: .25em .6em; border-bottom: 1px solid #ddd; text-align: left }
.wrong, .failed, .broken, .unavailable { color: #cc3311 } .wrong { font-weight: bold } .passed { color: #228833 }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif }
img { width: 128px; height: 128px; image-rendering: pixelated }
.wide { overflow-x: auto } pre { white-space: pre-wrap }
"""


_NUMBERS = "th:not(:first-child), td:not(:first-child) { text-align: right }\n"


def html_document(title: str, parts: Sequence[str], style: str = "") -> str:
    """A page that needs nothing else. parts: its body, escaped already; the title is plain text. style: CSS of its own."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(parts)}\n</body></html>\n'


def page(result: BenchResult) -> str:
    """The whole document."""
    title = f"{result.pipeline['name']}: engines side by side"
    parts = [f"<h1>{escape(title)}</h1>"]
    if result.wrong:
        parts.append(f'<p class="wrong">WRONG images: {escape(", ".join(result.wrong))}</p>')
    for index, case in enumerate(result.cases):
        rows = list(table(result, index))
        parts += [f"<h2>{escape(str(case))}</h2>", latencies(result, index), html_table(TABLE, rows)]
    if len(result.cases) > 1:
        parts += ["<h2>Images per second over the sweep</h2>", throughput(result)]
    left_out = [[each.name, each.status, each.reason or ""] for each in result.engines if each.reason]
    if left_out:
        parts += ["<h2>Not measured</h2>", html_table(("engine", "", "why"), left_out)]
    parts += ["<h2>Measured on</h2>", html_table(("", ""), [list(pair) for pair in about(result)])]
    return html_document(title, parts, _NUMBERS)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, escaped; without a head where no column has a name."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

    body = "".join(
        f'<tr class="wrong">{cells("td", row)}</tr>' if "WRONG" in row else f"<tr>{cells('td', row)}</tr>"
        for row in rows
    )
    head = f"<tr>{cells('th', columns)}</tr>" if any(columns) else ""
    return f'<div class="wide"><table>{head}{body}</table></div>'


def latencies(result: BenchResult, index: int) -> str:
    """A bar for each engine: its median, made of text, steps and decoder; the line goes to p90."""
    found = [(each.name, measured) for each in result.measured if (measured := each.cases[index]) is not None]
    found.sort(key=lambda pair: pair[1].image.median_ms)
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
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(shapes)}{legend}</svg>'


def _widths(measured: Measurement) -> Iterator[tuple[str, float]]:
    """Milliseconds of the median image: stages measured apart are scaled down where they come to more than it."""
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
    """Images per second of each engine, case by case; wrong ones as crosses."""
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
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(shapes)}</svg>'
