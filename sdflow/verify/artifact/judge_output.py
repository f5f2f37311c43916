"""Judge outputs by the distances of their cases alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import median, stdev

from sdflow.distance import root_mean_square
from sdflow.tolerances import (
    AT_MOST_UNCERTAIN,
    FLOAT16_RATIO,
    FLOAT32_AT_MOST,
    FLOAT32_LIMIT,
    FLOAT32_SHARE,
    ONE_CASE_RATIO,
    WITHOUT_YARDSTICK,
)
from sdflow.verify.result import HALVES, PLAIN, CaseDistance, OutputVerdict


def judge_output(
    name: str, precision: str, cases: Sequence[CaseDistance], stated: float | None = None, *, on_device: bool = False
) -> OutputVerdict:
    """Judge an output. on_device: computed by a provider's own kernels. stated: the workflow's limit.

    A 16-bit artifact's cases are measured in units of their own yardsticks, since one case may be fifty times as far
    off as the others and would decide alone. Their root mean square is limited to FLOAT16_RATIO, widened by their
    uncertainty, and each case to a wider margin; where fp16 PyTorch is not finite, to WITHOUT_YARDSTICK. A float32
    artifact's median is limited to FLOAT32_LIMIT, and each case to that or a share of its yardstick. A quantized
    artifact is limited by its workflow's `limit`, each case with the wider margin, and fails without one.
    """
    if precision not in PLAIN:
        distance = root_mean_square(case.distance for case in cases)
        each = stated is not None and all(case.distance <= ONE_CASE_RATIO * stated for case in cases)
        return OutputVerdict(name, distance, 0.0, 0.0, stated, stated is not None and distance <= stated and each)
    measured = [case for case in cases if case.yardstick != inf]
    distance = root_mean_square(case.distance for case in (measured if precision in HALVES else cases))
    yardstick = root_mean_square(case.yardstick for case in measured)
    if precision == "float32":
        ratio = distance / yardstick if yardstick else 0.0
        share = _of_float32_limits(cases, on_device)
        limit = distance / share if 0 < share < inf else FLOAT32_AT_MOST if on_device else FLOAT32_LIMIT
        return OutputVerdict(name, distance, yardstick, ratio, limit, share <= 1)
    if not measured:
        distance, limit = root_mean_square(case.distance for case in cases), WITHOUT_YARDSTICK
        return OutputVerdict(name, distance, yardstick, 0.0, limit, distance <= limit)
    ratio = root_mean_square(times_as_far(case) for case in measured)
    allowed = FLOAT16_RATIO * _uncertainty(measured)
    limit = allowed * (distance / ratio if 0 < ratio < inf else yardstick)
    each = all(times_as_far(case) <= ONE_CASE_RATIO for case in measured)
    each &= all(case.distance <= WITHOUT_YARDSTICK for case in cases if case.yardstick == inf)
    return OutputVerdict(name, distance, yardstick, ratio, limit, ratio <= allowed and each)


def _of_float32_limits(cases: Sequence[CaseDistance], on_device: bool) -> float:
    """A float32 artifact's worst share of a limit; above 1 it fails."""
    if on_device:
        return max(case.distance for case in cases) / FLOAT32_AT_MOST
    shares = [case.distance / float32_limit(case) for case in cases]
    return max(median(case.distance for case in cases) / FLOAT32_LIMIT, *shares)


def float32_limit(case: CaseDistance) -> float:
    """The limit for one case of a float32 artifact."""
    return min(FLOAT32_AT_MOST, max(FLOAT32_LIMIT, FLOAT32_SHARE * case.yardstick))


def times_as_far(case: CaseDistance) -> float:
    """A case in units of its yardstick. If PyTorch loses nothing, infinite for any distance above 0."""
    if case.yardstick == 0:
        return inf if case.distance else 0.0
    return case.distance / case.yardstick


def _uncertainty(cases: Sequence[CaseDistance]) -> float:
    """A factor from 1 to AT_MOST_UNCERTAIN: two standard errors of the logarithms of the cases' ratios.

    Rounding errors are random. With few numbers in a case, its ratio says little, and the ratios scatter.
    """
    ratios = [log(case.distance / case.yardstick) for case in cases if 0 < case.distance < inf and case.yardstick > 0]
    if len(ratios) < 2:
        return 1.0
    return min(AT_MOST_UNCERTAIN, exp(2 * stdev(ratios) / sqrt(len(ratios))))


def judge_outputs(
    precision: str, cases: Sequence[CaseDistance], stated: float | None = None, *, on_device: bool = False
) -> tuple[list[OutputVerdict], list[tuple[str, str]]]:
    """A verdict on each output, and the problems of those that fail. stated: the workflow's limit, if quantized."""
    verdicts, problems = [], []
    for name in dict.fromkeys(each.output for each in cases):
        of_output = [each for each in cases if each.output == name]
        verdicts.append(judge_output(name, precision, of_output, stated, on_device=on_device))
        if not verdicts[-1].passed:
            problems.append(_problem(verdicts[-1], precision, of_output))
    return verdicts, problems


def _problem(verdict: OutputVerdict, precision: str, cases: Sequence[CaseDistance]) -> tuple[str, str]:
    by_limit = precision == "float32"
    worst = max(cases, key=lambda case: case.distance / float32_limit(case) if by_limit else times_as_far(case))
    if any(case.distance == inf for case in cases):
        first = next(case for case in cases if case.distance == inf)
        return (
            f"{verdict.name} has another shape, NaN or infinity at {first.case}",
            "If values overflow fp16, keep their nodes in fp32 (OnnxFloatToFloat16: op_block_list or node_block_list), "
            "or use weights made for fp16.",
        )
    if precision not in PLAIN:
        return _beyond_stated(verdict, precision, max(cases, key=lambda case: case.distance))
    remedy = (
        "The graph or its weights do not match the model: rebuild with --clean_cache; if that does not help, remove "
    )
    remedy += "passes and fusions one by one (--set) until it passes."
    if precision == "float32":
        what = f"{verdict.name} is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2), but only "
        return f"{what}{verdict.limit:.2g} is allowed; worst at {worst.case}: {worst.distance:.2g}", remedy
    plain = f"plain {precision.replace('float16', 'fp16').replace('bfp', 'bf')} PyTorch"
    if all(case.yardstick == inf for case in cases):
        what = f"{verdict.name} is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2), but only "
        return f"{what}{WITHOUT_YARDSTICK:.2g} is allowed where {plain} gives no finite numbers", remedy
    what = f"{verdict.name} is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2), {plain} "
    what += f"{verdict.yardstick:.2g}: {verdict.ratio:.3g} times as far over all cases, but only {FLOAT16_RATIO} is allowed; "
    if worst.yardstick:
        return f"{what}worst at {worst.case}: {times_as_far(worst):.3g} times", remedy
    return f"{what}worst at {worst.case}: {worst.distance:.2g}, where {plain} loses nothing", remedy


def _beyond_stated(verdict: OutputVerdict, precision: str, worst: CaseDistance) -> tuple[str, str]:
    what = f"{verdict.name}, with {precision} weights, is {verdict.distance:.2g} away from the fp32 PyTorch model (relative L2)"
    what += f", worst at {worst.case}: {worst.distance:.2g}; "
    if verdict.limit is None:
        above = f"limit: {1.25 * verdict.distance:.1e} among the options of the quantizing pass."
        return f"{what}the workflow states no limit for it", f"If that is close enough, state it: {above}"
    what += f"the workflow's limit is {verdict.limit:g}"
    what += f", and {ONE_CASE_RATIO:g} times that for a single case" if verdict.distance <= verdict.limit else ""
    return what, "`sdflow verify --fix` finds the layers to leave unquantized (keep:). Or state another limit."
