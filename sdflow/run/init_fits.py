"""Choices of `sdflow init --fits`: the passes and options that make a pipeline fit, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sdflow.config.workflow import PipelineSpec
from sdflow.errors import UsageError
from sdflow.fits.choose import Choice, choose, in_words
from sdflow.fits.estimate import CONTEXT, ERROR
from sdflow.fits.known import estimated_by
from sdflow.fits.weights import is_half
from sdflow.machine.memory import HOST
from sdflow.units import spell_bytes


@dataclass(frozen=True)
class Fitted:
    """Lines for a workflow. options: of `sdflow generate`, each with a leading space."""

    comments: Sequence[str] = ()
    submodels: Sequence[str] = ()
    options: str = ""


NOT_FITTED = Fitted()


def fit_workflow(pipeline: PipelineSpec, available: int) -> Fitted:
    """Choose how to make the workflow's pipeline fit. available: bytes.

    Raises UsageError, naming the nearest choice, if nothing fits, and if the model's configs are not available.
    """
    checkpoint = estimated_by(pipeline)
    if checkpoint is None:
        raise UsageError(
            "its configs are not on this machine, so its size is not known",
            where=pipeline.model,
            remedy="Download it first (hf download), or leave out --fits.",
        )
    try:
        chosen, quicker = choose(pipeline, checkpoint, available)
    except (KeyError, TypeError) as error:
        lacks = f"lack {error}" if isinstance(error, KeyError) else f"have an entry of another type ({error})"
        raise UsageError(
            f"its configs {lacks}, so its size is not known",
            where=pipeline.model,
            remedy="Correct the model's config.json, or leave out --fits.",
        ) from error
    return Fitted(_comments(pipeline, chosen, quicker, available), _submodels(chosen), _options(chosen, available))


def _comments(pipeline: PipelineSpec, chosen: Choice, quicker: Sequence[Choice], available: int) -> list[str]:
    need = chosen.need
    kind = "memory" if pipeline.target == HOST else "device memory"
    error = "" if chosen.way == "streamed" else f"within {ERROR:.0%} of what was measured on CUDA; "
    lines = [
        "#",
        f"# Chosen for {spell_bytes(available)} of {kind}: {in_words(chosen)}. One image of {need.size}x{need.size} takes "
        f"{spell_bytes(available if chosen.way == 'streamed' else chosen.peak)} at most",
        f"# by estimate ({error}see docs/device_memory.md), {spell_bytes(need.outside)} of it outside the pipeline:",
    ]
    for submodel, each in need.submodels.items():
        quantized = chosen.quantized.get(submodel)
        held = "16 bits" if is_half(pipeline.submodels[submodel]) else "float32"
        why = held if quantized is None else f"{quantized.choosable.name}: {quantized.choosable.note}"
        working = f" and {spell_bytes(each.working)} of working memory" if each.working else ""
        lines.append(f"#   {submodel:16}{spell_bytes(each.weights)} of weights{working}    {why}")
    lines.append(f"# {_why_this_way(chosen, available)}")
    if need.tiled(chosen.way, available):
        lines.append("# The VAE decodes in bands of rows, which takes longer.")
    lines += [f"# Faster: {in_words(each)} takes {spell_bytes(each.peak)}." for each in quicker]
    return lines


def _why_this_way(chosen: Choice, available: int) -> str:
    need = chosen.need
    if chosen.way == "resident":
        return "All weights stay on the device: they fit together."
    together = spell_bytes(need.peak("resident"))
    if chosen.way == "streamed":
        return (
            f"Weights that do not fit are copied from host memory in every step: this {need.streaming_in_words(available)}\n"
            "# (--keep fit, the default; the image is the same, but takes longer)."
        )
    by = "--low-memory" if need.low_memory else "--keep fit, the default"
    return f"The submodels take turns ({by}; the image is the same, but takes longer): together they would take {together}."


def _options(chosen: Choice, available: int) -> str:
    need = chosen.need
    if chosen.way != "resident":
        return " --low-memory" if need.low_memory else f" --device-memory {(available - CONTEXT) // 10**6}MB"
    return "" if need.low_memory or need.keeps_all(available) else " --keep all"


def _submodels(chosen: Choice) -> list[str]:
    if not chosen.quantized:
        return []
    lines = ["", "submodels:"]
    for submodel, each in chosen.quantized.items():
        lines += [f"  {submodel}:", "    passes:", f"      {each.choosable.name}:    # {each.choosable.note}"]
        lines += [f"        {name}: {_value(value)}" for name, value in each.options.items()]
    return lines


def _value(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**9)).removesuffix("\n").removesuffix("\n...")
