"""The common look of all reports: one self-contained HTML page, readable on a phone and on paper.

Plain text is escaped here; arguments named `html` are HTML already.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
:root { color-scheme: light; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --good: #1a7f37; --bad: #cf222e;
  --warn: #9a6700; }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0 auto; max-width: 70rem; padding:
  1.5rem 1.25rem 3rem; color: var(--ink); background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.verdict { display: inline-block; font-weight: 600; color: #fff; border-radius: 1rem; padding: .05rem .8rem; margin-
  right: .5rem; }
.verdict.good { background: var(--good); }
.verdict.bad { background: var(--bad); }
.verdict.warn { background: var(--warn); }
.lead { margin: 0 0 1rem; font-size: 1.05rem; }
.remedy, small, .soft { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; border: 1px solid
  var(--line); border-radius: .5rem; padding: .7rem 1rem; background: #f6f8fa; }
dt { color: var(--soft); }
dd { margin: 0; }
.scrolls { overflow-x: auto; }
.scrolls svg { max-width: 100%; min-width: 36rem; height: auto; font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.wide { width: 50%; }
td.wide { min-width: 16rem; overflow-wrap: anywhere; }
.passed, .right { color: var(--good); }
.failed, .error, .wrong, .broken { color: var(--bad); font-weight: 600; }
.warning, .unavailable, .skipped { color: var(--warn); font-weight: 600; }
.images { display: flex; flex-wrap: wrap; gap: 1rem; margin: .6rem 0; }
figure { margin: 0; max-width: 100%; }
figure img { width: 256px; max-width: 100%; image-rendering: pixelated; border: 1px solid var(--line); border-radius:
  .3rem; display: block; }
figcaption { font-size: .85rem; color: var(--soft); max-width: 256px; margin-top: .25rem; }
.large img { width: auto; } .large figcaption { max-width: 100%; }
summary { cursor: pointer; }
details ul { margin: .3rem 0; padding-left: 1.2rem; max-height: 30rem; overflow-y: auto; }
pre { white-space: pre-wrap; background: #f6f8fa; padding: .7rem 1rem; border-radius: .5rem; }
@media (max-width: 40rem) { body { padding: 1rem .9rem 2rem; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-
  bottom: .4rem; } figure img { width: 44vw; } figcaption { max-width: 44vw; }
  .large img, .large figcaption { width: auto; max-width: 100%; } }
"""


def document(
    title: str,
    verdict: tuple[str, str],
    sentence: str,
    facts: Iterable[tuple[str, str]],
    html: Iterable[str],
    *,
    date: str | None = None,
) -> str:
    """Return the whole page. verdict: its word, and "good", "bad" or "warn". sentence: its meaning. facts: its scope.

    html: the sections, from `section`. date: replaces the current time.
    """
    word, kind = verdict
    shown = [("date", date or time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())), *facts]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in shown if value)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}: {escape(word)}</title><style>{STYLE}</style>"
    lead = f'<span class="verdict {kind}">{escape(word)}</span> {escape(sentence)}'
    body = "\n".join(each for each in html if each)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lead">{lead}</p>\n<dl>{listed}</dl>\n{body}\n</body></html>\n'
    )


def section(title: str, *html: str) -> str:
    """A heading, which may be HTML, with its content; empty if the content is."""
    return f"<h2>{title}</h2>{''.join(html)}" if any(html) else ""


def table(
    columns: Sequence[str],
    html: Iterable[Sequence[str]],
    numbers: Sequence[str] = (),
    wide: Sequence[str] = (),
    rows: Mapping[int, str] | None = None,
) -> str:
    """A table of HTML cells. numbers: right-aligned columns. wide: text columns that share the remaining width.
    rows: row number -> class."""
    kind = [' class="number"' if column in numbers else ' class="wide"' if column in wide else "" for column in columns]
    head = "".join(f"<th{each}>{escape(column)}</th>" for column, each in zip(columns, kind, strict=True))
    lines = []
    for number, row in enumerate(html):
        name = (rows or {}).get(number)
        cells = "".join(f"<td{each}>{cell}</td>" for cell, each in zip(row, kind, strict=True))
        marked = f' class="{name}"' if name else ""
        lines.append(f"<tr{marked}>{cells}</tr>")
    first = f"<tr>{head}</tr>" if any(columns) else ""
    return f'<div class="scrolls"><table>{first}{"".join(lines)}</table></div>'


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table of plain text cells."""
    return table(columns, [[escape(cell) for cell in row] for row in rows], numbers)


def plot(svg: str) -> str:
    """A plot that scrolls in windows too narrow for its labels."""
    return f'<div class="scrolls">{svg}</div>'


def images(shown: Iterable[tuple[str, bytes | str]], *, large: bool = False) -> str:
    """PNGs side by side, each with a caption: (caption, file or base64). large: at their own size, as far as it
    fits."""
    figures = []
    for caption, png in shown:
        data = png if isinstance(png, str) else base64.b64encode(png).decode()
        source = f"data:image/png;base64,{escape(data)}"
        figures.append(
            f'<figure><img alt="{escape(caption)}" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>'
        )
    return f'<div class="images{" large" if large else ""}">{"".join(figures)}</div>' if figures else ""


def listed(html: Iterable[str]) -> str:
    """A list; empty if there are no items."""
    items = "".join(f"<li>{each}</li>" for each in html)
    return f"<ul>{items}</ul>" if items else ""


def folded(summary: str, html: str) -> str:
    """Content that a click unfolds."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"
