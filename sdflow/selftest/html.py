"""A report of a self-test as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from sdflow.selftest.lines import about, images, parts
from sdflow.selftest.result import Report

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 }
th, td { padding: .25em .6em; border-bottom: 1px solid #ddd; text-align: left }
.passed { color: #228833 } .failed, .broken, .unavailable { color: #cc3311 }
img { width: 128px; height: 128px; image-rendering: pixelated }
.wide { overflow-x: auto } pre { white-space: pre-wrap }
"""


def page(report: Report) -> str:
    """The whole document. Everything of the report is escaped: it may be anybody's."""
    title = f"Self-test of {report.target}: {report.verdict}"
    body = [f'<h1 class="{report.verdict}">{escape(title)}</h1>']
    if report.reason:
        body.append(f"<pre>{escape(report.reason)}</pre>")
    body.append(_table(("", ""), about(report)))
    if report.submodels:
        body += ["<h2>Where its nodes run, and how fast</h2>", _table(parts.columns, parts.rows(report))]
    fallen = [(name, *node) for name, part in report.submodels.items() for node in part.fallen]
    if fallen:
        body += ["<h2>Nodes on another provider</h2>", _table(("submodel", "node", "operator", "provider"), fallen)]
    if report.images:
        body.append("<h2>Images: the target's, PyTorch's on the CPU</h2>")
        shown = [
            f'<tr><td><img alt="" src="data:image/png;base64,{escape(pair.png)}"></td>'
            f'<td><img alt="" src="data:image/png;base64,{escape(pair.pytorch_png)}"></td>'
            f"<td>{'<br>'.join(map(escape, row))}</td></tr>"
            for pair, row in zip(report.images, images.rows(report), strict=True)
        ]
        body.append(f"<table>{''.join(shown)}</table>")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

    head = f"<tr>{cells('th', columns)}</tr>" if any(columns) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'
