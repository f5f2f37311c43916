"""The report of a run as one page: steps, verification, speed, and the image."""

from __future__ import annotations

from html import escape
from pathlib import Path

from sdflow.bench.evaluate import EvaluationResult
from sdflow.disk.atomic_write import write_whole
from sdflow.errors import os_errors_as
from sdflow.page import document, folded, images, listed, plot, section, text_table
from sdflow.report.run import fused_operators, of_chain
from sdflow.run.run import PipelineResult
from sdflow.units import spell_bytes, spell_milliseconds, spell_seconds
from sdflow.verify.report.rows import NUMBERS, SUBMODELS, submodel_rows

WIDTH, ROW, LABEL, VALUE = 720, 24, 150, 110


def write_run_page(pipeline: PipelineResult, results: Path) -> Path:
    """Write `<name>.html` into the results folder. Raises UsageError if that fails."""
    path = results / f"{pipeline.plan.pipeline.name}.html"
    with os_errors_as("cannot be written", path):
        write_whole(path, page(pipeline).encode())
    return path


def page(pipeline: PipelineResult) -> str:
    """The whole document."""
    planned, measured, verification = pipeline.plan.pipeline, pipeline.evaluation, pipeline.verification
    steps = sum(map(len, pipeline.steps.values()))
    sentence = f"{pipeline.ran} of {steps} steps ran, in {spell_seconds(pipeline.seconds)}."
    if measured is not None and measured.pipeline is not None:
        sentence += f" An image takes {spell_milliseconds(measured.pipeline.median_ms)} ({_size(measured)})."
    versions = measured.versions if measured is not None else verification.versions if verification is not None else {}
    facts = [
        ("model", planned.model),
        ("target", planned.target),
        ("LoRAs", ", ".join(f"{Path(each.reference).name} {each.scale:g}" for each in planned.loras)),
        ("folder", str(pipeline.folder)),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))),
    ]
    sections = [_image(measured), _latency(measured), _verification(pipeline), _steps(pipeline)]
    verdict = ("built and verified", "good") if verification is not None else ("built, not verified", "warn")
    return document(f"{planned.name}", verdict, sentence, facts, sections)


def _size(measured: EvaluationResult) -> str:
    settings = measured.settings
    return f"{settings['height']}x{settings['width']}, {settings['steps']} steps"


def _image(measured: EvaluationResult | None) -> str:
    if measured is None or measured.image is None:
        return ""
    with os_errors_as("cannot be read", Path(measured.image)):
        png = Path(measured.image).read_bytes()
    return section("Image", images([(f"{measured.settings.get('prompt', '')}; {_size(measured)}", png)], large=True))


def _latency(measured: EvaluationResult | None) -> str:
    """Median times as bars, with all figures in a table."""
    if measured is None:
        return ""
    if not measured.measured:
        return section("Not measured", f"<p>{escape(measured.reason or '')}</p>")
    timed = [(name, part.latency) for name, part in measured.submodels.items() if part.latency is not None]
    timed += [] if measured.pipeline is None else [("whole image", measured.pipeline)]
    columns = ("of", "runs", "first ms", "median ms", "p90 ms", "p99 ms", "min ms")
    rows = [
        (
            name,
            str(each.runs),
            *(f"{value:,.2f}" for value in (each.first_ms, each.median_ms, each.p90_ms, each.p99_ms, each.min_ms)),
        )
        for name, each in timed
    ]
    notes = listed(escape(note) for note in measured.notes)
    peak = f"<p>Peak memory of the process: {spell_bytes(measured.peak_memory_bytes or 0)}.</p>"
    bars = _bars([(name, each.median_ms) for name, each in timed])
    return section(
        f"Latency on {escape(str(measured.provider))}", bars, text_table(columns, rows, columns[1:]), peak, notes
    )


def _bars(medians: list[tuple[str, float]]) -> str:
    if not medians:
        return ""
    scale = (WIDTH - LABEL - VALUE) / max(value for _, value in medians)
    shapes = []
    for row, (name, value) in enumerate(medians):
        top, width = row * ROW + 4, max(1.0, value * scale)
        middle = top + (ROW - 8) / 2 + 4
        shapes += [
            f'<rect x="{LABEL}" y="{top}" width="{width:.1f}" height="{ROW - 8}" fill="#4477aa"/>',
            f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>',
            f'<text x="{LABEL + width + 6:.1f}" y="{middle}">{value:,.1f} ms</text>',
        ]
    height = len(medians) * ROW + 4
    return plot(f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(shapes)}</svg>')


def _verification(pipeline: PipelineResult) -> str:
    verification = pipeline.verification
    if verification is None:
        return ""
    more = f"<p>Details are in {escape(verification.name)}.verify.html.</p>"
    return section(
        "Verification against PyTorch",
        text_table((*SUBMODELS[:-1], "verdict"), submodel_rows(verification), NUMBERS),
        more,
    )


def _steps(pipeline: PipelineResult) -> str:
    """A row per submodel; single steps are folded."""
    columns = ("submodel", "steps", "time", "memory", "nodes", "size")
    short = text_table(columns, [(name, *of_chain(chain)) for name, chain in pipeline.steps.items()], columns[2:])
    every = [
        (
            name,
            step.step.name,
            step.outcome,
            spell_seconds(step.record.built["seconds"]),
            spell_bytes(step.record.built["peak_memory"]),
            spell_bytes(step.record.artifact.bytes),
            fused_operators(step.record.facts.get("operators", {})),
        )
        for name, chain in pipeline.steps.items()
        for step in chain
    ]
    heads = ("submodel", "pass", "outcome", "time", "memory", "size", "fused operators")
    notes = listed(escape(note) for note in pipeline.plan.every_note)
    return section("Steps", short, folded("every step", text_table(heads, every, heads[3:6])), notes)
