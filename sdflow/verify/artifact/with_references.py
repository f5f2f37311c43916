"""Verify the denoiser with reference images: its graph, extended as when a pipeline is loaded, against PyTorch's module
called as diffusers calls it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sdflow.distance import relative_l2
from sdflow.errors import SdflowError
from sdflow.families.shared.base import Family
from sdflow.families.shared.references import References
from sdflow.verify.artifact.graph import open_graph, run_each
from sdflow.verify.artifact.judge_output import judge_outputs
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.reference.cases import Cases
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.once import sharing
from sdflow.verify.reference.torch_module import TorchModule
from sdflow.verify.reference.turns import Turns
from sdflow.verify.result import CaseDistance

if TYPE_CHECKING:
    import torch

SIZES = ((5, 7), (8, 3))
"""Rows and columns of two references' latents: not square, and different."""
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Referring:
    """Inputs of a recorded case, with the latents of reference images, each (1, channels, rows, columns)."""

    name: str
    inputs: Arrays
    latents: tuple[np.ndarray, ...]


def judge_references(
    request: JudgeRequest, family: Family, precision: str, cases: Cases, torch_module: TorchModule
) -> tuple[list[tuple[str, str]], Sequence[str]]:
    """Return the problems and the coverage, in words. precision: of the artifact. cases: the denoiser's without
    references.

    In 16 bits, PyTorch's distance in that type is the yardstick, as without references; nothing is rounded again.
    """
    name, references = family.denoiser, family.references
    assert references is not None, "the family takes them"
    shown = [*referring_cases(cases, full=request.level == "full")]
    most = request.most.get(name)
    try:
        graph = open_graph(
            request.folder / name, request.target, threads=request.threads, most=most, edit=references.extend
        )
        drawn = [*run_each(graph, [_extended(references, each) for each in shown])]
    except SdflowError as error:
        return [(f"with reference images: {error.what}", error.remedy or "Build it again.")], ()
    del graph
    gc.collect()
    found = _distances(shown, drawn, references, torch_module, precision)
    stated = request.quantized.get(name, {}).get("limit")
    _, problems = judge_outputs(precision, found, stated)
    sizes = ", ".join(f"{rows}x{columns}" for rows, columns in SIZES)
    covered = f"{name} with reference images: {len(shown)} cases, latents of {sizes}"
    return [(f"with reference images, {what}", remedy) for what, remedy in problems], (covered,)


def referring_cases(cases: Cases, *, full: bool) -> Iterator[Referring]:
    """Cases at the first step with two references; with `full` also at the last step with one, and of a batch."""
    steps = [index for index, case in cases if case.group == "trajectory"]
    batches = [index for index, case in cases if case.group == "shape" and len(_sample(cases, index)) > 1]
    wanted = [(steps[0], 2)] + ([(steps[-1], 1), *((index, 2) for index in batches[:1])] if full else [])
    random = np.random.default_rng(len(cases.cases))
    for index, count in wanted:
        channels = _sample(cases, index).shape[1]
        latents = (random.standard_normal((1, channels, *size), dtype=np.float32) for size in SIZES[:count])
        name = f"{cases.cases[index].name}, {count} reference{'s' if count > 1 else ''}"
        yield Referring(name, cases.get(index, "inputs"), tuple(latents))


def _sample(cases: Cases, index: int) -> np.ndarray:
    """The first input, which always has one row per batch item."""
    return next(iter(cases.get(index, "inputs").values()))


def _extended(references: References, case: Referring) -> Arrays:
    """The inputs of the extended graph."""
    import torch

    rows = len(next(iter(case.inputs.values())))
    added = references.inputs([torch.from_numpy(each) for each in case.latents], rows)
    return {**case.inputs, **{name: value.numpy() for name, value in added.items()}}


def _distances(
    shown: Sequence[Referring], drawn: Sequence[Arrays], references: References, wanted: TorchModule, precision: str
) -> list[CaseDistance]:
    exact, half = _in_pieces(shown, references, wanted) if wanted.most else _whole(shown, references, wanted)
    return [
        CaseDistance(
            case.name, "references", name, None, None, relative_l2(ours[name], value), relative_l2(near[name], value)
        )
        for case, ours, value_of, near in zip(shown, drawn, exact, half, strict=True)
        for name, value in value_of.items()
    ]


def _whole(
    shown: Sequence[Referring], references: References, wanted: TorchModule
) -> tuple[list[Arrays], list[Arrays]]:
    """What PyTorch's module gives of each case in float32 and in 16 bits, one after the other."""
    import torch

    network = wanted.network()
    with torch.no_grad():
        exact: list[Arrays] = [_by_torch(network, references, each, torch.float32) for each in shown]
        network.to_half(wanted.half)
        with quick_halves(network.module):
            return exact, [_by_torch(network, references, each, getattr(torch, wanted.half)) for each in shown]


def _in_pieces(
    shown: Sequence[Referring], references: References, wanted: TorchModule
) -> tuple[list[Arrays], list[Arrays]]:
    """As `_whole`, of a module that is read piece by piece: each piece is read once for all cases in both precisions."""
    import torch

    exact, rounded = wanted.network(), wanted.network()
    rounded.to_half(wanted.half)
    assert rounded.weights is not None
    known = rounded.weights.wide

    def in_half(case: Referring) -> Arrays:
        with quick_halves(known=known):
            return _by_torch(rounded, references, case, getattr(torch, wanted.half))

    turns = Turns()
    with sharing(turns, exact, rounded):
        runs = [turns.start(partial(_by_torch, exact, references, each, torch.float32)) for each in shown]
        halves = [turns.start(partial(in_half, each)) for each in shown]
        turns.finish()
    return [each.result for each in runs], [each.result for each in halves]


def _by_torch(network: Network, references: References, case: Referring, dtype: torch.dtype) -> dict[str, np.ndarray]:
    import torch

    kept = {port.name for port in network.ports.inputs if port.exact}
    inputs = {
        name: value if name in kept else value.to(dtype)
        for name, value in ((name, torch.from_numpy(each)) for name, each in case.inputs.items())
    }
    latents = [torch.from_numpy(each).to(dtype) for each in case.latents]
    found = references.by_diffusers(network.module, inputs, latents)
    return {name: value.float().numpy() for name, value in found.items()}
