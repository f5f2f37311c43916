"""The report of a verification: one HTML page that needs nothing else, and the same as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from sdflow.disk.atomic_write import write_whole
from sdflow.errors import os_errors_as
from sdflow.tolerances import EXACT_AT_MOST, EXACT_LIMIT, FLOAT16_RATIO, FLOAT32_AT_MOST, FLOAT32_LIMIT
from sdflow.verify.check import Verified
from sdflow.verify.ensemble import PREFIX
from sdflow.verify.finding import LEVELS
from sdflow.verify.images import AMPLIFIED
from sdflow.verify.kinds import Kind, kinds
from sdflow.verify.report.plot import plot_steps
from sdflow.verify.result import ImageVerdict, SubmodelVerdict, Verification, spell_limit

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c1c1c; }
.scrolls { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; }
td, th { padding: .2rem .7rem; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #888; white-space: nowrap; } td { border-bottom: 1px solid #ddd; }
.number { text-align: right; } th.wide { width: 50%; } td.wide { min-width: 16rem; overflow-wrap: anywhere; }
.passed { color: #06752f; } .failed, .error { color: #b00020; font-weight: 600; } .warning { color: #8a5300; font-weight: 600; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figure img { width: 256px; image-rendering: pixelated; border: 1px solid #bbb; }
figcaption { font-size: 13px; color: #444; } h2 { margin-top: 2rem; } .remedy, small { color: #555; }
li { overflow-wrap: anywhere; } summary { cursor: pointer; } svg { max-width: 100%; }
details ul { margin: .3rem 0; padding-left: 1.2rem; max-height: 30rem; overflow-y: auto; }
"""


def write_reports(verified: Verified, folder: Path) -> Path:
    """Write `<name>.verify.html` and `<name>.verify.json` into `folder`; returns the page's path."""
    result = verified.result
    _replace(folder / f"{result.name}.verify.json", json.dumps(result.to_json(), indent=1).encode())
    page = folder / f"{result.name}.verify.html"
    write_html(verified, page)
    return page


def write_html(verified: Verified, path: Path) -> None:
    """Write the page, in one step."""
    _replace(path, page(verified.result, verified.images).encode())


def _replace(path: Path, content: bytes) -> None:
    with os_errors_as("cannot be written", path):
        write_whole(path, content)


def page(result: Verification, images: Mapping[str, bytes]) -> str:
    """The whole page. images: file name -> PNG."""
    word = _verdict(result.passed)
    sections = [
        f"<h1>{escape(result.name)} for {escape(result.target)}: {word}</h1>",
        f"<p>Level {escape(result.level)}, {result.seconds:g} s. Each output's distance (relative L2) to the fp32 PyTorch "
        f"model, against that of plain fp16 PyTorch; ratio: root mean square of the cases' own: at most {FLOAT16_RATIO} "
        f"for float16 artifacts; at most {FLOAT32_LIMIT:.0e} for float32 ones, {FLOAT32_AT_MOST:.0e} in "
        f"a case where fp16 PyTorch loses much. Unrounded: a float16 artifact in float32, with "
        f"its weights before they were rounded, at the case where it is worst; at most {EXACT_LIMIT:.0e}, "
        f"and {EXACT_AT_MOST:.0e} where fp16 PyTorch loses much.</p>",
        _problems(result),
        _verdicts(result),
        _devices(result),
        *(_steps(part) for part in result.submodels.values()),
        _images(result, images),
        _findings(result),
        _operators(result),
        "<h2>Coverage</h2>" + _list(escape(line) for line in [*result.coverage, *_not_covered(result)]),
        "<h2>Cases</h2>" + "".join(_cases(part) for part in result.submodels.values()),
        "<h2>Versions and artifacts</h2>"
        + _list(f"{escape(name)} {escape(version)}" for name, version in sorted(result.versions.items()))
        + _list(f"{escape(name)} <small>{escape(digest)}</small>" for name, digest in result.artifacts.items()),
    ]
    title = f"{escape(result.name)}: {'passed' if result.passed else 'failed'}"
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _verdict(passed: bool, words: str = "passed") -> str:
    return f'<span class="passed">{words}</span>' if passed else '<span class="failed">FAILED</span>'


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = (), wide: Sequence[str] = ()
) -> str:
    """A table; cells are HTML. numbers: columns that end at the right. wide: those that hold text, and share the room."""
    kind = [' class="number"' if column in numbers else ' class="wide"' if column in wide else "" for column in columns]
    head = "".join(f"<th{each}>{column}</th>" for column, each in zip(columns, kind, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{each}>{cell}</td>" for cell, each in zip(row, kind, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scrolls"><table><tr>{head}</tr>{body}</table></div>'


def _problems(result: Verification) -> str:
    if result.passed:
        return ""
    listed = _list(
        f'<b>{escape(where)}</b>: {escape(what)}<br><span class="remedy">{escape(remedy)}</span>'
        for where, what, remedy in result.problems
    )
    gone = [
        f"{escape(part.name)}: of {len(part.block.gone)} blocks before the first that differs, the graph does not have the end: "
        f"they were fused<br><small>{escape(', '.join(part.block.gone))}</small>"
        for part in result.submodels.values()
        if part.block and part.block.gone
    ]
    return "<h2>What does not pass</h2>" + listed + (_list(gone) if gone else "")


def _verdicts(result: Verification) -> str:
    numbers = ("unrounded", "distance", "fp16 PyTorch", "ratio", "at most", "weights computed again")
    rows: list[tuple[str, ...]] = []
    for part in result.submodels.values():
        exact = {each.name: each for each in part.exact}
        for output in part.outputs:
            ratio = f"{output.ratio:.2f}" if output.yardstick else ""
            unrounded = f"{exact[output.name].distance:.1e}" if output.name in exact else ""
            plain = "" if part.quantized else f"{output.yardstick:.2e}"
            cells = (unrounded, f"{output.distance:.2e}", plain, ratio, spell_limit(part, output))
            passed = output.passed and (output.name not in exact or exact[output.name].passed)
            verdict = _verdict(passed, f"within the limit for {part.precision}" if part.quantized else "passed")
            rows.append((part.name, output.name, part.precision, part.ran, *cells, str(part.weights), verdict))
        if not part.outputs:
            rows.append((part.name, "", part.precision, part.ran, *[""] * len(numbers), _verdict(False)))
    return "<h2>Submodels</h2>" + _table(("submodel", "output", "precision", "run", *numbers, "verdict"), rows, numbers)


def _devices(result: Verification) -> str:
    """What the provider's own kernels gave."""
    rows: list[tuple[str, ...]] = []
    for part in result.submodels.values():
        if (device := part.device) is None:
            continue
        for output in device.outputs:
            ratio = f"{output.ratio:.2f}" if output.yardstick else ""
            cells = (f"{output.distance:.2e}", ratio, spell_limit(part, output), _verdict(output.passed))
            rows.append((part.name, output.name, device.target, *cells))
        if not device.outputs:
            rows.append((part.name, "", device.target, "", "", "", _verdict(False)))
    if not rows:
        return ""
    numbers = ("distance", "ratio", "at most")
    tuned = next((part.device.tuned for part in result.submodels.values() if part.device and part.device.tuned), "")
    title = f"With the provider's own kernels{f', tuned: {escape(tuned)}' if tuned else ''}"
    return f"<h2>{title}</h2>" + _table(("submodel", "output", "on", *numbers, "verdict"), rows, numbers)


def _steps(part: SubmodelVerdict) -> str:
    """The error along the denoising steps, of a submodel that is run at each."""
    steps = [case for case in part.cases if case.group == "trajectory" and case.step is not None]
    if len(steps) < 2:
        return ""
    limit = FLOAT16_RATIO if part.precision == "float16" else None
    return f"<h2>{escape(part.name)} along the denoising steps</h2>" + plot_steps(steps, limit)


def _images(result: Verification, images: Mapping[str, bytes]) -> str:
    meaning = ""
    if result.meaning is not None:
        meaning = f"<p>Meaning: {result.meaning.artifact:.0%} of {result.meaning.cases} images of the sample's "
        meaning += f"evaluation set show what was asked for, PyTorch's {result.meaning.reference:.0%}.</p>"
    alone = _image("The image", result.image, images, "")
    return alone + meaning + _image("The image of base and refiner", result.ensemble, images, PREFIX)


def _image(title: str, verdict: ImageVerdict | None, images: Mapping[str, bytes], prefix: str) -> str:
    if verdict is None:
        return ""
    captions = {
        "pytorch": "fp32 PyTorch",
        "artifact": "the artifacts",
        "difference": f"their difference, {AMPLIFIED} times amplified",
    }
    figures = "".join(
        f'<figure><img alt="{caption}" src="data:image/png;base64,{base64.b64encode(images[f"{prefix}{name}.png"]).decode()}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for name, caption in captions.items()
    )

    def row(name: str, psnr: float | None, ssim: float, largest: float) -> tuple[str, ...]:
        return name, "equal" if psnr is None else f"{psnr:.1f} dB", f"{ssim:.5f}", f"{largest:.2g}"

    rows = [
        row("the artifacts", verdict.psnr, verdict.ssim, verdict.largest_difference),
        row("plain fp16 PyTorch", verdict.float16_psnr, verdict.float16_ssim, verdict.float16_largest_difference),
    ]
    text = f"<p>{escape(verdict.prompt)}; {verdict.steps} steps, {verdict.height}x{verdict.width} pixels, the same latents.</p>"
    table = _table(("against fp32 PyTorch", "PSNR", "SSIM", "largest difference"), rows)
    words = f"{verdict.quantized}, held to no limit" if verdict.quantized else "passed"
    return f"<h2>{title}: {_verdict(not verdict.problems, words)}</h2>{text}{figures}{table}"


def _findings(result: Verification) -> str:
    if not result.findings:
        return ""
    rows = [
        (
            f'<span class="{kind.level}">{kind.level}</span>',
            kind.check,
            f'{escape(kind.what)}<br><span class="remedy">{escape(kind.remedy)}</span>',
            f"{kind.count:,}",
            _places(kind),
        )
        for kind in sorted(kinds(result.findings), key=lambda kind: LEVELS.index(kind.level))
    ]
    columns = ("level", "check", "what, and what to do", "places", "where")
    return "<h2>The target and the folder</h2>" + _table(
        columns, rows, ("places",), wide=("what, and what to do", "where")
    )


def _places(kind: Kind) -> str:
    """Where a kind was found, folded away where there are several places; what is said there, if it is not the same."""
    shown = {kind.remedy}
    lines = []
    for finding in kind.findings:
        line = escape(" ".join(filter(None, (finding["submodel"], finding["node"]))))
        if finding["count"] > 1:
            line += f" and {finding['count'] - 1:,} more"
        if finding["what"] != kind.what:
            line += f": {escape(finding['what'])}"
        if finding["remedy"] not in shown:
            shown.add(finding["remedy"])
            line += f'<br><span class="remedy">{escape(finding["remedy"])}</span>'
        lines.append(line)
    if len(lines) == 1:
        return lines[0]
    submodels = {finding["submodel"]: 0 for finding in kind.findings}
    for finding in kind.findings:
        submodels[finding["submodel"]] += finding["count"]
    summary = ", ".join(f"{escape(name) or 'the pipeline'} {count:,}" for name, count in submodels.items())
    return f"<details><summary>{summary}</summary>{_list(lines)}</details>"


def _operators(result: Verification) -> str:
    rows = []
    for part in result.submodels.values():
        counted = sorted(part.operators.items(), key=lambda item: (-item[1], item[0]))
        lowered = ", ".join(f"{name} {count}" for name, count in part.lowered.items()) or "none"
        rows.append((part.name, str(sum(part.operators.values())), ", ".join(f"{n} {c}" for n, c in counted), lowered))
    return "<h2>Operators, and those lowered to run on this CPU</h2>" + _table(
        ("submodel", "nodes", "operators", "lowered"), rows, ("nodes",)
    )


def _not_covered(result: Verification) -> list[str]:
    parts = result.submodels.values()
    unproved = [f"{part.name}: not proved without its roundings: {part.unproved}" for part in parts if part.unproved]
    return unproved + [
        f"{part.name}: its fixed shapes leave out {', '.join(part.left_out)}" for part in parts if part.left_out
    ]


def _cases(part: SubmodelVerdict) -> str:
    rows = [
        (escape(case.case), case.group, case.output, f"{case.distance:.2e}", f"{case.yardstick:.2e}")
        for case in part.cases
    ]
    columns = ("case", "group", "output", "distance", "fp16 PyTorch")
    return f"<details><summary>{part.name}: {len(rows)}</summary>{_table(columns, rows, columns[3:])}</details>"
