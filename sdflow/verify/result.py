"""What a verification found: plain data and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sdflow.errors import VerificationError
from sdflow.verify.as_json import from_json
from sdflow.verify.finding import Finding, errors, kinds

FORMAT_VERSION = 2

HALVES = ("float16", "bfloat16")
PLAIN = ("float32", *HALVES, "unknown")
"""Precisions of artifacts that are not quantized; unknown: of one that cannot be loaded."""


@dataclass(frozen=True)
class CaseDistance:
    """One output of one case. distance, yardstick: of the artifact and of plain fp16 PyTorch to fp32 PyTorch. draws: of how
    many ways to round (`sdflow.verify.artifact.roundings`) these are the lower quartile."""

    case: str
    group: str
    output: str
    step: int | None
    timestep: float | None
    distance: float
    yardstick: float
    draws: int = 1


@dataclass(frozen=True)
class OutputVerdict:
    """One output over all cases: root mean squares of the distances, of fp16 PyTorch's, and of how many times as far each case
    is. limit: the distance at which it would just pass, were all its cases farther or nearer alike; None for one that is
    quantized where the workflow states none."""

    name: str
    distance: float
    yardstick: float
    ratio: float
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class ExactOutput:
    """One output of a float16 or quantized artifact without its roundings, at the case where it comes nearest to its limit, or
    goes farthest beyond: the distance to fp32 PyTorch."""

    name: str
    distance: float
    case: str
    limit: float
    passed: bool


@dataclass(frozen=True)
class BlockVerdict:
    """Where an artifact that is not exact goes wrong (`sdflow.verify.artifact.blocks`).

    first: the first block that differs; "" when it is none of them, but what lies between. distance: of its output from the
    value of the graph that is nearest. there, blocks: how many blocks' outputs are in the graph as PyTorch has them, of how
    many. gone: blocks before it whose outputs are in no value of the graph, as they were fused.
    """

    case: str
    first: str
    distance: float
    there: int
    blocks: int
    gone: tuple[str, ...]

    def words(self) -> str:
        found = f"{self.there} of {self.blocks} blocks give what PyTorch's give at {self.case}"
        if not self.first:
            return f"{found}; no block by itself is to blame, but what lies between them"
        away = "" if math.isinf(self.distance) else f" (what comes nearest is {self.distance:.1e} away)"
        return f"{found}; the first that does not, for what it is given, is {self.first}{away}"


@dataclass(frozen=True)
class DeviceVerdict:
    """One submodel on hardware that was there. problems: those of its outputs, or why it does not run. tuned: the options that
    `sdflow tune` chose for it; "" for the target's own. left_out: how many cases were not run, as the device is emulated and
    others have their shapes."""

    target: str
    outputs: tuple[OutputVerdict, ...]
    problems: tuple[tuple[str, str], ...]
    tuned: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class SubmodelVerdict:
    """One submodel. precision: "float16", "float32", or what it is quantized to ("int8"): then the limit is the workflow's own,
    and fp16 PyTorch is no yardstick. ran: "as it is" or "lowered". operators: fused ones. problems: why it does not pass, with
    what to do. left_out: cases that its fixed shapes refuse. exact: the first part of the proof; unproved: why there is none.
    weights: how many were computed again from the checkpoint. device: what its provider's own kernels gave, where they were
    asked for. block: where an exact run goes wrong.
    """

    name: str
    precision: str
    ran: str
    operators: Mapping[str, int]
    lowered: Mapping[str, int]
    outputs: tuple[OutputVerdict, ...]
    cases: tuple[CaseDistance, ...]
    problems: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...] = ()
    exact: tuple[ExactOutput, ...] = ()
    weights: int = 0
    unproved: str = ""
    device: DeviceVerdict | None = None
    block: BlockVerdict | None = None

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def quantized(self) -> bool:
        """Whether it is held to the workflow's own limit, and to nothing of float16's."""
        return self.precision not in PLAIN

    @property
    def beyond_stated(self) -> bool:
        """Whether it is quantized, and farther than the workflow states, and nothing else is wrong."""
        failed = [output for output in self.outputs if not output.passed]
        stated = all(output.limit is not None for output in failed)
        return self.quantized and bool(failed) and stated and len(self.problems) == len(failed)


def spell_limit(part: SubmodelVerdict, output: OutputVerdict) -> str:
    """What an output may be at most, and for one that is quantized, whose word that is."""
    if output.limit is None:
        return "not stated"
    return f"{output.limit:.2e}{', the workflow says' if part.quantized else ''}"


def worst_output(outputs: Sequence[OutputVerdict]) -> OutputVerdict:
    """The one that goes farthest beyond its limit, or comes nearest to it; one that fails before others."""
    return max(outputs, key=lambda each: (not each.passed, each.distance / each.limit if each.limit else each.distance))


@dataclass(frozen=True)
class ImageVerdict:
    """The image from the same latents, against fp32 PyTorch's. psnr in decibels; None stands for infinity.

    float16_*: what plain fp16 PyTorch's image has. quantized: what submodels that draw are quantized to; then it is told how near
    the image is, and nothing asked for but that it is one. Files: PNG, in the folder of the verification.
    """

    psnr: float | None
    ssim: float
    largest_difference: float
    float16_psnr: float | None
    float16_ssim: float
    float16_largest_difference: float
    prompt: str
    steps: int
    height: int
    width: int
    problems: tuple[tuple[str, str], ...]
    quantized: str = ""


@dataclass(frozen=True)
class MeaningVerdict:
    """The sample's measure: the share of images that show the colour and kind they should, of PyTorch and of ours."""

    cases: int
    reference: float
    artifact: float
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Verification:
    """A verified pipeline. coverage: what was looked at, in words. artifacts: submodel -> digest.

    overflowing: submodel -> the nodes that put out or read values that float16 does not hold. ensemble: the image of a base and
    its refiner together, whose submodels are `refiner/SUBMODEL`.
    """

    name: str
    target: str
    level: str
    submodels: Mapping[str, SubmodelVerdict]
    image: ImageVerdict | None
    meaning: MeaningVerdict | None
    findings: tuple[Finding, ...] = ()
    overflowing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coverage: tuple[str, ...] = ()
    artifacts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cached: bool = False
    ensemble: ImageVerdict | None = None

    @property
    def problems(self) -> list[tuple[str, str, str]]:
        """(where, what, what to do) of everything that does not pass; what is found in many places is one problem."""
        found = [(name, *problem) for name, part in self.submodels.items() for problem in part.problems]
        for where, part in (
            ("image", self.image),
            ("meaning", self.meaning),
            ("image of base and refiner", self.ensemble),
        ):
            found += [(where, *problem) for problem in (part.problems if part else ())]
        return found + [(kind.where, kind.first.what, kind.first.remedy) for kind in kinds(errors(self.findings))]

    @property
    def beyond_stated(self) -> list[str]:
        """The quantized submodels that are farther than the workflow states, and with which nothing else is wrong."""
        return [name for name, part in self.submodels.items() if part.beyond_stated]

    @property
    def passed(self) -> bool:
        return not self.problems

    def failure(self) -> str:
        """Every problem, with what to do."""
        listed = "\n".join(f"  {where}: {what}\n    {remedy}" for where, what, remedy in self.problems)
        return f"verification failed:\n{listed}"

    def raise_for_failure(self) -> None:
        """Raises VerificationError that lists every problem."""
        if not self.passed:
            raise VerificationError(self.failure(), where=self.name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with its `format_version`; infinities are the text "inf", as JSON has none."""
        content = {"format_version": FORMAT_VERSION, "passed": self.passed, **asdict(self)}
        plain: dict[str, Any] = _without_infinities(content)
        return plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verification:
        """What `to_json` wrote. Raises ValueError for another format."""
        content = dict(value)
        if content.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError("not a verification of a known format")
        return from_json(cls, content)


def _without_infinities(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    return [_without_infinities(each) for each in value] if isinstance(value, list | tuple) else value
