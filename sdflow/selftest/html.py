"""A report of a self-test as one page that needs nothing else."""

from __future__ import annotations

from html import escape

from sdflow.bench.html import html_document, html_table
from sdflow.selftest.lines import about, images, parts
from sdflow.selftest.result import Report


def page(report: Report) -> str:
    """The whole document. Everything of the report is escaped: it may be anybody's."""
    title = f"Self-test of {report.target}: {report.verdict}"
    body = [f'<h1 class="{report.verdict}">{escape(title)}</h1>']
    if report.reason:
        body.append(f"<pre>{escape(report.reason)}</pre>")
    body.append(html_table(("", ""), about(report)))
    if report.submodels:
        body += ["<h2>Where its nodes run, and how fast</h2>", html_table(parts.columns, parts.rows(report))]
    fallen = [(name, *node) for name, part in report.submodels.items() for node in part.fallen]
    if fallen:
        body += ["<h2>Nodes on another provider</h2>", html_table(("submodel", "node", "operator", "provider"), fallen)]
    if report.images:
        body.append("<h2>Images: the target's, PyTorch's on the CPU</h2>")
        shown = [
            f'<tr><td><img alt="" src="data:image/png;base64,{escape(pair.png)}"></td>'
            f'<td><img alt="" src="data:image/png;base64,{escape(pair.pytorch_png)}"></td>'
            f"<td>{'<br>'.join(map(escape, row))}</td></tr>"
            for pair, row in zip(report.images, images.rows(report), strict=True)
        ]
        body.append(f"<table>{''.join(shown)}</table>")
    return html_document(title, body)
