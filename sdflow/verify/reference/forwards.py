"""Run each submodel's own forward, with outputs named like its ports, and record diffusers' calls to it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.families.shared.part import Part
from sdflow.models.base import Config, Model
from sdflow.models.ports import Ports
from sdflow.verify.reference.cases import Case, Cases, Kind
from sdflow.verify.reference.streamed import StreamedWeights

if TYPE_CHECKING:
    import torch

Call = tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]
"""Submodel, inputs by name, outputs by name; no outputs if the module does not return a tensor for each."""

TOGETHER = 2**15
"""Limit for the size of the first input of a run that several cases share: two latents of 64x64, or 32 of 16x16."""


@dataclass(frozen=True)
class Network:
    """A module, its model, and its graph's inputs and outputs. weights: set if they are not all in memory."""

    module: torch.nn.Module
    model: Model
    ports: Ports
    weights: StreamedWeights | None = None

    @classmethod
    def of(cls, part: Part, config: Config, module: torch.nn.Module, weights: StreamedWeights | None = None) -> Network:
        """config: the submodel's config.json, as the family sees it."""
        model = part.of(config).model
        return cls(module, model, model.ports(config), weights)

    def to_half(self, half: str = "float16") -> None:
        """Convert the module to plain 16-bit PyTorch, in place. half: "float16" or "bfloat16"."""
        import torch

        dtype = getattr(torch, half)
        if self.weights is None:
            self.model.to_half(self.module, dtype)
        else:
            self.weights.convert(lambda module: self.model.to_half(module, dtype), dtype)

    @property
    def whole_batch(self) -> str | None:
        """The input with one value for the whole batch, if any: the timestep."""
        return next((port.name for port in self.ports.inputs if port.axes == (1,)), None)

    @property
    def constants(self) -> frozenset[str]:
        """Further inputs with one value for the whole batch, equal in all cases: the scales of image prompts."""
        return frozenset(port.name for port in self.ports.inputs if port.axes == (1,)) - {self.whole_batch}


def run_cases(cases: Cases, kind: Kind, network: Network, half: str = "float16") -> None:
    """Compute the outputs of every case without any of this kind. kind: "float32" or "float16", matching the module;
    also "float16" for a bfloat16 module, with `half` naming the type.

    Cases of one shape are batched, up to TOGETHER: a run of few latents takes as long as reading the module's weights,
    however many rows there are.
    """
    for chosen in batches(cases, kind, network):
        run_batch(cases, chosen, kind, network, half)


def run_batch(cases: Cases, chosen: Sequence[int], kind: Kind, network: Network, half: str = "float16") -> None:
    """Compute the outputs of these cases, which have one shape, in one run. kind, half: see `run_cases`."""
    import torch

    dtype = getattr(torch, half) if kind == "float16" else torch.float32
    exact = {port.name for port in network.ports.inputs if port.exact}
    once = network.constants
    rows = [_rows(cases.get(index, "inputs"), network.whole_batch) for index in chosen]
    joined = {
        name: torch.from_numpy(value if name in once else np.concatenate([each[name] for each in rows]))
        for name, value in rows[0].items()
    }
    inputs = {
        name: value.to(dtype) if value.dtype == torch.float32 and name not in exact else value
        for name, value in joined.items()
    }
    found = network.model.reference(network.module, inputs)
    outputs = {
        name: (value.float() if value.dtype == torch.bfloat16 else value).numpy() for name, value in found.items()
    }
    start = 0
    for index, each in zip(chosen, rows, strict=True):
        end = start + _size(each)
        cases.put(index, kind, {name: value[start:end].copy() for name, value in outputs.items()})
        start = end


def batches(cases: Cases, kind: Kind, network: Network) -> Iterator[list[int]]:
    """Indices of the cases without outputs of this kind, grouped by run."""
    return _batches(cases, kind, network.whole_batch, network.constants)


def _batches(cases: Cases, kind: Kind, whole_batch: str | None, constants: Container[str]) -> Iterator[list[int]]:
    alike: dict[Any, list[int]] = {}
    for index, _ in cases:
        if not cases.get(index, kind):  # otherwise recorded while generating
            inputs = _rows(cases.get(index, "inputs"), whole_batch)
            shapes = (
                (name, value.tobytes() if name in constants else value.shape[1:]) for name, value in inputs.items()
            )
            alike.setdefault(tuple(shapes), []).append(index)
    for indices in alike.values():
        chosen: list[int] = []
        numbers = 0
        for index in indices:
            size = next(iter(cases.get(index, "inputs").values())).size
            if chosen and numbers + size > TOGETHER:
                yield chosen
                chosen, numbers = [], 0
            chosen.append(index)
            numbers += size
        yield chosen


def _rows(inputs: Mapping[str, np.ndarray], whole_batch: str | None) -> dict[str, np.ndarray]:
    """The inputs, with values for the whole batch repeated for each row."""
    size = _size(inputs)
    return {name: value.repeat(size) if name == whole_batch else value for name, value in inputs.items()}


def _size(inputs: Mapping[str, np.ndarray]) -> int:
    """Rows of the batch, from the first input, which always has one for each."""
    return len(next(iter(inputs.values())))


@contextmanager
def recording(networks: Mapping[str, Network]) -> Iterator[list[Call]]:
    """Record diffusers' calls to these modules, with their outputs."""
    calls: list[Call] = []
    hooks: list[Any] = []
    for name, network in networks.items():
        hooks += [
            network.module.register_forward_pre_hook(_before(name, network, calls), with_kwargs=True),
            network.module.register_forward_hook(_after(network, calls), with_kwargs=True),
        ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _before(name: str, network: Network, calls: list[Call]) -> Callable[..., None]:
    types = {port.name: port.dtype for port in network.ports.inputs}

    def record(module: Any, arguments: Any, named: Any) -> None:
        inputs = {**network.model.recorded_inputs(arguments, named), **network.model.recorded_state(module)}
        calls.append((name, {key: value.numpy().astype(types[key]) for key, value in inputs.items()}, {}))

    return record


def _after(network: Network, calls: list[Call]) -> Callable[..., None]:
    def record(module: Any, arguments: Any, named: Any, output: Any) -> None:
        if isinstance(output, tuple):
            name, inputs, _ = calls[-1]
            a_list_of_images = len(output) == 1 and isinstance(output[0], list)
            listed = output[0] if a_list_of_images else output
            tensors = [value for value in listed if hasattr(value, "numpy")]
            given = network.model.recorded_outputs(network.ports, named, tensors)
            calls[-1] = (name, inputs, {key: value.numpy().copy() for key, value in given.items()})

    return record


def trajectory(calls: Sequence[Call], submodel: str, network: Network) -> Cases:
    """Every run of the denoiser, or of a ControlNet, as a case, with its result if that is a tensor for each output."""
    cases = Cases()
    for step, (inputs, outputs) in enumerate((inputs, outputs) for name, inputs, outputs in calls if name == submodel):
        time = float(inputs[str(network.whole_batch)][0])
        cases.add(Case(f"step {step + 1}, timestep {time:g}", "trajectory", step, time), inputs)
        if outputs:
            cases.put(step, "float32", outputs)
    return cases
