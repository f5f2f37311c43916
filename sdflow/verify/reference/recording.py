"""What diffusers feeds its modules, written down while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.forwards import Network

Call = tuple[str, dict[str, "np.ndarray"], dict[str, "np.ndarray"]]
"""Submodel, inputs by name, outputs by name: none where the module does not give a tensor for each."""


@contextmanager
def recording(networks: Mapping[str, Network]) -> Iterator[list[Call]]:
    """While this is open, what diffusers feeds these modules is written down, with what comes out."""
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
            tensors = [value for value in output if hasattr(value, "numpy")]
            given = network.model.recorded_outputs(network.ports, named, tensors)
            calls[-1] = (name, inputs, {key: value.numpy().copy() for key, value in given.items()})

    return record


def trajectory(calls: Sequence[Call], submodel: str, network: Network) -> Cases:
    """Every run of the denoiser, or of a ControlNet, is a case, with its result where it is a tensor for each output."""
    cases = Cases()
    for step, (inputs, outputs) in enumerate((inputs, outputs) for name, inputs, outputs in calls if name == submodel):
        time = float(inputs[str(network.whole_batch)][0])
        cases.add(Case(f"step {step + 1}, timestep {time:g}", "trajectory", step, time), inputs)
        if outputs:
            cases.put(step, "float32", outputs)
    return cases
