"""Choose quantization and weight placement for a memory size: least loss first, then all weights resident."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from sdflow.config.workflow import PipelineSpec, StepSpec
from sdflow.errors import UsageError
from sdflow.fits.estimate import WAYS, MemoryNeed, Way, memory_need
from sdflow.fits.low_bits import CHOOSABLE, LOW_BITS, Choosable
from sdflow.fits.weights import parameter_count
from sdflow.machine.memory import HOST
from sdflow.sources import Checkpoint
from sdflow.units import spell_bytes


@dataclass(frozen=True)
class Quantized:
    """A pass for a submodel, appended to its chain. options: including `insert_after`."""

    choosable: Choosable
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A choice. quantized: submodel -> pass; others keep their precision. loss: sum over the passes."""

    need: MemoryNeed
    way: Way
    quantized: Mapping[str, Quantized]

    @property
    def loss(self) -> int:
        """The loss of exactness, for comparing choices."""
        return sum(each.choosable.loss for each in self.quantized.values())

    @property
    def peak(self) -> int:
        """Estimated peak in bytes."""
        return self.need.peak(self.way)


def choices(pipeline: PipelineSpec, checkpoint: Checkpoint, choosable: Sequence[Choosable] = CHOOSABLE) -> list[Choice]:
    """Every combination that the target supports, in order of preference: exact before quantized, and resident before
    taking turns before streamed.

    choosable: the passes to choose from. Raises UsageError if a submodel's size cannot be estimated.
    """
    per_submodel = [
        [(name, each) for each in (None, *_quantizations(pipeline, checkpoint, name, choosable))]
        for name in (*checkpoint.family.text_of(checkpoint.submodels), checkpoint.family.denoiser)
        if name in pipeline.submodels
    ]
    found = []
    for combination in product(*per_submodel):
        quantized = {name: each for name, each in combination if each is not None}
        need = memory_need(_with(pipeline, quantized), checkpoint)
        if need.unknown:
            raise UsageError(
                f"the size of its {', '.join(need.unknown)} is unknown before the build",
                where=checkpoint.reference,
                remedy="Leave out --fits.",
            )
        found += [Choice(need, way, quantized) for way in need.ways]
    return sorted(found, key=lambda each: (each.loss, WAYS.index(each.way)))


def choose(
    pipeline: PipelineSpec,
    checkpoint: Checkpoint,
    available: int,
    choosable: Sequence[Choosable] = CHOOSABLE,
) -> tuple[Choice, tuple[Choice, ...]]:
    """The first choice that fits into this many bytes, and a later, faster one, if any, whose weights move less.

    Raises UsageError, naming the nearest choice, if none fits.
    """
    every = choices(pipeline, checkpoint, choosable)
    found = first_fitting(every, available)
    if found is None:
        least = min(every, key=lambda each: each.need.needed(each.way))
        wanted = math.ceil(least.need.needed(least.way) / 1e8) / 10
        largest = max(least.need.submodels.items(), key=lambda item: item[1].weights)
        elsewhere = "" if pipeline.target == HOST else ", or generate on the CPU: --target cpu"
        raise UsageError(
            f"the smallest build of {pipeline.model} for {pipeline.target} takes {spell_bytes(least.peak)} "
            f"({in_words(least)}); its {largest[0]} alone has {spell_bytes(largest[1].weights)} of weights",
            where=f"--fits {spell_bytes(available)}",
            remedy=f"The nearest that fits: --fits {wanted:g}GB. Or choose a smaller model{elsewhere}.",
        )
    return found


def first_fitting(every: Sequence[Choice], available: int) -> tuple[Choice, tuple[Choice, ...]] | None:
    """The result of `choose` for ordered choices; None if none fits."""
    fitting = [each for each in every if each.need.fits(each.way, available)]
    if not fitting:
        return None
    chosen, *others = fitting
    quicker = [each for each in others if WAYS.index(each.way) < WAYS.index(chosen.way)]
    return chosen, tuple(quicker[:1])


def in_words(choice: Choice) -> str:
    """Describe a choice in a phrase."""
    shared = {
        "resident": "all weights resident",
        "turns": "submodels take turns",
        "streamed": "weights are streamed from host memory",
    }[choice.way]
    parts = [f"{name} with {_pass_in_words(each)}" for name, each in choice.quantized.items()]
    return f"{' and '.join(parts)}, {shared}" if parts else shared


def _pass_in_words(each: Quantized) -> str:
    bits = each.options.get("bits")
    return each.choosable.name + (f" ({bits} bits)" if bits is not None else "")


def _quantizations(
    pipeline: PipelineSpec, checkpoint: Checkpoint, name: str, choosable: Sequence[Choosable]
) -> Iterator[Quantized]:
    """The quantizations available for a submodel; none if its chain already quantizes it."""
    family, config = checkpoint.family, checkpoint.submodels[name].load["config"]
    steps = pipeline.submodels[name]
    if not steps or any(step.pass_name in LOW_BITS for step in steps):
        return
    denoises = name == family.denoiser
    count = parameter_count(family.part(name).of(config).model, config) or 0
    for each in choosable:
        if not each.is_there or pipeline.target not in each.targets or (each.of == "denoiser") != denoises:
            continue
        if denoises and each.name not in family.quantizing:
            continue
        if count >= each.least:
            own = family.quantizing[each.name] if denoises else {}
            yield Quantized(each, {"insert_after": steps[-1].pass_name, **own, **each.options})


def _with(pipeline: PipelineSpec, quantized: Mapping[str, Quantized]) -> PipelineSpec:
    submodels = dict(pipeline.submodels)
    for name, each in quantized.items():
        last = submodels[name][-1]
        options = {key: value for key, value in each.options.items() if key != "insert_after"}
        submodels[name] = (*submodels[name], StepSpec(each.choosable.name, options, {}, last.mark, last.folder))
    return replace(pipeline, submodels=submodels)
