"""The tables of a verification, for pages and terminals: columns and rows, with a verdict in the last column."""

from __future__ import annotations

from collections.abc import Sequence

from sdflow.verify.result import OutputVerdict, SubmodelVerdict, Verification, spell_limit, worst_output

Rows = list[tuple[str, ...]]

SUBMODELS = ("submodel", "type", "worst output", "distance", "limit", "")
OUTPUTS = (
    "submodel", "output", "graph", "unrounded", "distance", "fp16 PyTorch", "ratio", "limit", "weights recomputed", "",
)  # fmt: skip
DEVICES = ("submodel", "output", "on", "distance", "vs fp16 PyTorch", "vs CPU run", "limit", "")
NUMBERS = (
    *("unrounded", "distance", "fp16 PyTorch", "ratio", "limit", "weights recomputed"),
    *("vs fp16 PyTorch", "vs CPU run"),
)


def submodel_rows(result: Verification) -> Rows:
    """Rows of `SUBMODELS`: each with the output nearest to its limit, or farthest beyond."""
    rows: Rows = []
    for part in result.submodels.values():
        if not part.outputs:
            rows.append((part.name, part.precision, "", "", "", "FAILED"))
            continue
        worst = worst_output(part.outputs)
        limit = "not stated" if worst.limit is None else f"{worst.limit:.2e}"
        passed = (
            part.passed and all(output.passed for output in part.outputs) and all(each.passed for each in part.exact)
        )
        cells = (_counted(worst, part.outputs), f"{worst.distance:.2e}", limit, _verdict(part, passed))
        rows.append((part.name, part.precision, *cells))
    return rows


def output_rows(result: Verification) -> Rows:
    """Rows of `OUTPUTS`: all results of each output of each submodel."""
    rows: Rows = []
    for part in result.submodels.values():
        graph, exact = f"{part.precision}, {part.ran}", {each.name: each for each in part.exact}
        for output in part.outputs:
            unrounded = exact.get(output.name)
            cells = (
                "" if unrounded is None else f"{unrounded.distance:.1e}",
                f"{output.distance:.2e}",
                "" if part.quantized else f"{output.yardstick:.2e}",
                _ratio(output),
                spell_limit(part, output),
                str(part.weights),
            )
            passed = output.passed and (unrounded is None or unrounded.passed)
            rows.append((part.name, output.name, graph, *cells, _verdict(part, passed)))
        if not part.outputs:
            rows.append((part.name, "", graph, *[""] * 6, "FAILED"))
    return rows


def device_rows(result: Verification, *, worst: bool = False) -> tuple[str, Rows]:
    """Return a suffix for the title, about tuning and omitted cases, and rows of `DEVICES`: results of the provider's own
    kernels next to this CPU's. worst: only each submodel's worst output."""
    rows: Rows = []
    tuned, left_out = "", 0
    for part in result.submodels.values():
        if (device := part.device) is None:
            continue
        tuned = tuned or device.tuned
        left_out += device.left_out
        here = {each.name: each.distance for each in part.outputs}
        for output in (worst_output(device.outputs),) if worst and device.outputs else device.outputs:
            name = _counted(output, device.outputs) if worst else output.name
            relative = f"{output.distance / here[output.name]:.2f}" if here.get(output.name) else ""
            cells = (f"{output.distance:.2e}", _ratio(output), relative, spell_limit(part, output))
            rows.append((part.name, name, device.target, *cells, "passed" if output.passed else "FAILED"))
        if not device.outputs:
            rows.append((part.name, "", device.target, *[""] * 4, "FAILED"))
    said = f", tuned: {tuned}" if tuned else ""
    if left_out:
        said += f" (emulated GPU: {left_out} further cases of the same shapes were not run)"
    return said, rows


def _counted(output: OutputVerdict, outputs: Sequence[OutputVerdict]) -> str:
    return output.name if len(outputs) == 1 else f"{output.name} (of {len(outputs)})"


def _ratio(output: OutputVerdict) -> str:
    return f"{output.ratio:.2f}" if output.yardstick else ""


def _verdict(part: SubmodelVerdict, passed: bool) -> str:
    if not passed:
        return "FAILED"
    return "within its limit" if part.quantized else "passed"
