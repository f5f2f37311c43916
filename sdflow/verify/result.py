"""The result of a verification: plain data and JSON."""

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
"""Precisions of artifacts that are not quantized; unknown if the artifact cannot be loaded."""


@dataclass(frozen=True)
class CaseDistance:
    """One output of one case. distance, yardstick: of the artifact and of plain fp16 PyTorch from fp32 PyTorch. draws:
    if above 1, both are lower quartiles of this many roundings (`sdflow.verify.artifact.roundings`)."""

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
    """One output over all cases: root mean squares of the distances, of fp16 PyTorch's, and of their ratios. limit: the
    distance at which it would just pass if all its cases scaled alike; None if quantized and the workflow states
    none."""

    name: str
    distance: float
    yardstick: float
    ratio: float
    limit: float | None
    passed: bool


@dataclass(frozen=True)
class ExactOutput:
    """One output of a float16 or quantized artifact without roundings, at the case nearest to its limit or farthest
    beyond: the distance from fp32 PyTorch."""

    name: str
    distance: float
    case: str
    limit: float
    passed: bool


@dataclass(frozen=True)
class BlockVerdict:
    """Where an inexact artifact deviates (`sdflow.verify.artifact.blocks`).

    first: the first block that differs; "" if the fault is between blocks. distance: of its output from the nearest
    value of the graph. there, blocks: number of blocks whose outputs are in the graph, and of all blocks. gone: earlier
    blocks whose outputs are in no value of the graph, because they were fused.
    """

    case: str
    first: str
    distance: float
    there: int
    blocks: int
    gone: tuple[str, ...]

    def words(self) -> str:
        found = f"{self.there} of {self.blocks} blocks match PyTorch's at {self.case}"
        if not self.first:
            return f"{found}; the fault is between blocks"
        away = "" if math.isinf(self.distance) else f" (the nearest value is {self.distance:.1e} away)"
        return f"{found}; the first that does not, given correct inputs, is {self.first}{away}"


@dataclass(frozen=True)
class DeviceVerdict:
    """One submodel on local hardware. problems: of its outputs, or why it does not run. tuned: the options chosen by
    `sdflow tune`; "" for the target's own. left_out: the number of cases that were not run, because the device is
    emulated and others have their shapes."""

    target: str
    outputs: tuple[OutputVerdict, ...]
    problems: tuple[tuple[str, str], ...]
    tuned: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class SubmodelVerdict:
    """One submodel. precision: "float16", "float32", or the quantized type ("int8"), whose limit is the workflow's own,
    without fp16 PyTorch as a yardstick. ran: "as it is" or "lowered". operators: fused ones. problems: why it fails,
    with remedies.
    left_out: cases that its fixed shapes exclude. exact: the first part of the proof; unproved: why there is none.
    weights: number recomputed from the checkpoint. device: results of its provider's own kernels, if requested. block:
    where an exact run deviates.
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
        """Whether its limit is the workflow's own instead of float16's."""
        return self.precision not in PLAIN

    @property
    def beyond_stated(self) -> bool:
        """Whether it is quantized, exceeds the workflow's limit, and has no other problem."""
        failed = [output for output in self.outputs if not output.passed]
        stated = all(output.limit is not None for output in failed)
        return self.quantized and bool(failed) and stated and len(self.problems) == len(failed)


def spell_limit(part: SubmodelVerdict, output: OutputVerdict) -> str:
    """An output's limit, and whether the workflow states it."""
    if output.limit is None:
        return "not stated"
    return f"{output.limit:.2e}{' (workflow)' if part.quantized else ''}"


def worst_output(outputs: Sequence[OutputVerdict]) -> OutputVerdict:
    """The output nearest to its limit or farthest beyond; failed ones first."""
    return max(outputs, key=lambda each: (not each.passed, each.distance / each.limit if each.limit else each.distance))


@dataclass(frozen=True)
class ImageVerdict:
    """The image from the same latents, compared with fp32 PyTorch's. psnr in dB; None stands for infinity.

    float16_*: of plain fp16 PyTorch's image. quantized: the quantized type of its submodels; then distances are
    reported, and the image only has to be finite. Files: PNG, in the verification's folder.
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
    """The sample's score: the share of images with the right colour and kind, for PyTorch and for the artifact."""

    cases: int
    reference: float
    artifact: float
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Verification:
    """A verified pipeline. coverage: what was checked, in words. artifacts: submodel -> digest.

    overflowing: submodel -> nodes that output or read values beyond float16. ensemble: the image of a base and its
    refiner, whose submodels are `refiner/SUBMODEL`.
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
        """(where, what, remedy) of everything that fails; a problem in several places is listed once."""
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
        """The quantized submodels that exceed the workflow's limit and have no other problem."""
        return [name for name, part in self.submodels.items() if part.beyond_stated]

    @property
    def passed(self) -> bool:
        return not self.problems

    def failure(self) -> str:
        """Every problem with its remedy."""
        listed = "\n".join(f"  {where}: {what}\n    {remedy}" for where, what, remedy in self.problems)
        return f"verification failed:\n{listed}"

    def raise_for_failure(self) -> None:
        """Raises VerificationError with every problem."""
        if not self.passed:
            raise VerificationError(self.failure(), where=self.name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with its `format_version`; infinities, which JSON lacks, become the text "inf"."""
        content = {"format_version": FORMAT_VERSION, "passed": self.passed, **asdict(self)}
        plain: dict[str, Any] = _without_infinities(content)
        return plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verification:
        """Parse `to_json`'s result. Raises ValueError for another format."""
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
