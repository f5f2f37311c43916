"""What passes and what does not, from the distances of the cases alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import stdev

from sdflow.distance import root_mean_square
from sdflow.tolerances import AT_MOST_UNCERTAIN, FLOAT16_RATIO, FLOAT32_LIMIT, ONE_CASE_RATIO, WITHOUT_YARDSTICK
from sdflow.verify.result import CaseDistance, OutputVerdict


def judge_output(name: str, precision: str, cases: Sequence[CaseDistance]) -> OutputVerdict:
    """Root mean squares over the cases, held to the limit; each float16 case also by itself, with a wider margin. Of a float32
    artifact each case is held to the limit.

    The limit of a float16 artifact is FLOAT16_RATIO times the yardstick, and what the cases leave uncertain.

    Where plain fp16 PyTorch itself gives no finite number, a float16 artifact is held to WITHOUT_YARDSTICK.
    """
    measured = [case for case in cases if case.yardstick != inf]
    distance = root_mean_square(case.distance for case in (measured if precision == "float16" else cases))
    yardstick = root_mean_square(case.yardstick for case in measured)
    if precision == "float32":
        each = all(case.distance <= FLOAT32_LIMIT for case in cases)
        return OutputVerdict(name, distance, yardstick, FLOAT32_LIMIT, each)
    limit = FLOAT16_RATIO * _uncertainty(measured) * yardstick
    each = all(case.distance <= ONE_CASE_RATIO * case.yardstick for case in measured)
    if not measured:
        distance, limit = root_mean_square(case.distance for case in cases), WITHOUT_YARDSTICK
    else:
        each &= all(case.distance <= WITHOUT_YARDSTICK for case in cases if case.yardstick == inf)
    return OutputVerdict(name, distance, yardstick, limit, distance <= limit and each)


def _uncertainty(cases: Sequence[CaseDistance]) -> float:
    """A factor, 1 to AT_MOST_UNCERTAIN: two standard errors of the cases' ratios (of their logarithms).

    Rounding errors are random. Where a case has few numbers, its ratio says little, and the cases' ratios scatter.
    """
    ratios = [log(case.distance / case.yardstick) for case in cases if 0 < case.distance < inf and case.yardstick > 0]
    if len(ratios) < 2:
        return 1.0
    return min(AT_MOST_UNCERTAIN, exp(2 * stdev(ratios) / sqrt(len(ratios))))


def judge_outputs(precision: str, cases: Sequence[CaseDistance]) -> tuple[list[OutputVerdict], list[tuple[str, str]]]:
    """A verdict on each output, and why those that fail do."""
    verdicts, problems = [], []
    for name in dict.fromkeys(each.output for each in cases):
        of_output = [each for each in cases if each.output == name]
        verdicts.append(judge_output(name, precision, of_output))
        if not verdicts[-1].passed:
            problems.append(_problem(verdicts[-1], precision, of_output))
    return verdicts, problems


def _problem(verdict: OutputVerdict, precision: str, cases: Sequence[CaseDistance]) -> tuple[str, str]:
    worst = max(cases, key=lambda case: case.distance / case.yardstick if case.yardstick else case.distance)
    if any(case.distance == inf for case in cases):
        first = next(case for case in cases if case.distance == inf)
        return (
            f"{verdict.name} has another shape, NaN or infinity at {first.case}",
            "If values overflow fp16, keep their nodes in fp32 (OnnxFloatToFloat16: op_block_list or node_block_list), "
            "or take weights made for fp16.",
        )
    remedy = "The graph or its weights are not those of the model: build it again with --clean_cache; if that does not "
    remedy += "help, take passes and fusions out one by one (--set) until it passes."
    if precision == "float32":
        what = f"{verdict.name} is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2), at most "
        return f"{what}{verdict.limit:.0e} is allowed; worst at {worst.case}: {worst.distance:.2g}", remedy
    what = (
        f"{verdict.name} is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2), plain fp16 PyTorch "
    )
    what += (
        f"is {verdict.yardstick:.2g}: {_times(verdict.distance, verdict.yardstick)} as far, at most {FLOAT16_RATIO} "
    )
    what += f"is allowed; worst at {worst.case}: {_times(worst.distance, worst.yardstick)}"
    return what, remedy


def _times(distance: float, yardstick: float) -> str:
    return f"{distance / yardstick:.3g} times" if yardstick else f"{distance:.2g} against nothing"
