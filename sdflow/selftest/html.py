"""A report of a self-test as one page that needs nothing else."""

from __future__ import annotations

from html import escape

from sdflow.page import document, images, section, text_table
from sdflow.selftest.lines import about, parts
from sdflow.selftest.lines import images as image_lines
from sdflow.selftest.result import Report

_KINDS = {"passed": "good", "unavailable": "warn"}
_SENTENCES = {
    "passed": "This hardware draws what PyTorch draws on the CPU.",
    "failed": "This hardware draws something else than PyTorch on the CPU, or nodes ran elsewhere.",
    "unavailable": "The target is not available on this machine.",
    "broken": "The sample could not be built, or did not run.",
}


def page(report: Report) -> str:
    """The whole document. Everything of the report is escaped: it may be anybody's."""
    reason = f"<pre>{escape(report.reason)}</pre>" if report.reason else ""
    numbers = ("fallen", "median ms", "load s")
    fallen = [(name, *node) for name, part in report.submodels.items() for node in part.fallen]
    columns = ("submodel", "node", "operator", "provider")
    drawn = [
        shown
        for pair in report.images
        for shown in ((f"{report.target}: {pair.prompt}", pair.png), ("PyTorch on the CPU", pair.pytorch_png))
    ]
    sections = [
        reason,
        section("Images", images(drawn), text_table(image_lines.columns, image_lines.rows(report))) if drawn else "",
        section("Where its nodes run, and how fast", text_table(parts.columns, parts.rows(report), numbers))
        if report.submodels
        else "",
        section("Nodes on another provider", text_table(columns, fallen)) if fallen else "",
    ]
    verdict = report.verdict, _KINDS.get(report.verdict, "bad")
    title = f"Self-test of {report.target}"
    return document(title, verdict, _SENTENCES[report.verdict], about(report), sections)
