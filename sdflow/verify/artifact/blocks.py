"""Locate the error in a graph that deviates from PyTorch: the first block with a different result.

Names do not survive fusions, so blocks are found by their values: the module and the graph without roundings run one
case with all values exposed, and a block is present if some value of the graph equals its result, in any order of axes.
A block is to blame if its inputs are in the graph and its result is not. If a fused operator extends past its end, the
smallest enclosing block with both ends in the graph is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.tolerances import EXACT_LIMIT
from sdflow.verify.artifact.stored import BoundModel
from sdflow.verify.reference.torch_module import LoraMerge, TorchModule
from sdflow.verify.result import BlockVerdict

if TYPE_CHECKING:
    import torch

LAYOUTS = {2: ((0, 1), (1, 0)), 3: ((0, 1, 2), (0, 2, 1)), 4: ((0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3), (0, 1, 3, 2))}
"""Axis orders that a graph may use for a result."""


@dataclass
class Block:
    """A call of a module. start, end: its position among all calls. given: input tensors. gave: its first output
    tensor."""

    name: str
    leaf: bool
    start: int
    given: list[torch.Tensor]
    gave: torch.Tensor | None = None
    inside: list[Block] = field(default_factory=list)
    distance: float = inf
    given_there: bool = False

    @property
    def there(self) -> bool:
        return self.distance <= EXACT_LIMIT


def watch(submodel: str, bound: BoundModel, inputs: Mapping[str, np.ndarray], most: int | None = None) -> Block:
    """Run the PyTorch model on a case. Returns the calls of its modules, nested in the root's. most: see
    `TorchModule`."""
    import torch

    loras = [LoraMerge(lora.path, lora.scale) for lora in bound.loras]
    network = TorchModule(submodel, bound.checkpoint, loras, bound.denoiser, most=most).network()
    module = network.module
    whole = Block("", False, 0, [torch.from_numpy(value) for value in inputs.values()])
    opened, count = [whole], itertools.count(1)

    def begin(called: Any, args: Any, kwargs: Any) -> None:
        block = Block(names[called], not any(called.children()), next(count), [*_tensors((args, kwargs))])
        opened[-1].inside.append(block)
        opened.append(block)

    def end(called: Any, args: Any, kwargs: Any, result: Any) -> None:
        opened.pop().gave = next(_tensors(result), None)

    names = {each: name for name, each in module.named_modules()}
    hooks = [each.register_forward_pre_hook(begin, with_kwargs=True) for name, each in module.named_modules() if name]
    hooks += [each.register_forward_hook(end, with_kwargs=True) for name, each in module.named_modules() if name]
    try:
        with torch.no_grad():
            network.model.reference(module, {name: torch.from_numpy(value) for name, value in inputs.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return whole


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors among a module's inputs or outputs."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def sizes_of(whole: Block) -> set[int]:
    """The sizes of all inputs and outputs of the blocks, in elements."""
    tensors = [tensor for block in (whole, *_all(whole)) for tensor in (*block.given, block.gave)]
    return {tensor.numel() for tensor in tensors if tensor is not None}


def first_block(whole: Block, values: Sequence[np.ndarray], case: str) -> BlockVerdict:
    """The block to blame. values: of the graph, including its inputs."""
    held = _Values(values)
    for tensor in whole.given:
        held.add(tensor.numpy())
    blocks = [*_all(whole)]
    for block in blocks:
        block.distance = inf if block.gave is None else held.distance(block.gave)
        block.given_there = all(held.distance(tensor) <= EXACT_LIMIT for tensor in block.given)
    blamed = _blame(whole)
    around = _around(whole, blamed)
    before = [block for block in blocks if block.start < blamed.start and block not in around]
    gone = tuple(block.name for block in before if not (block.leaf or block.there or block.gave is None))
    return BlockVerdict(case, blamed.name, blamed.distance, sum(block.there for block in blocks), len(blocks), gone)


def _all(block: Block) -> Iterator[Block]:
    for inner in block.inside:
        yield inner
        yield from _all(inner)


def _around(whole: Block, wanted: Block) -> list[Block]:
    """The chain of calls that contain a block, outermost first."""
    for inner in whole.inside:
        if inner is wanted:
            return [whole]
        if wanted in [*_all(inner)]:
            return [whole, *_around(inner, wanted)]
    return []


def _blame(block: Block) -> Block:
    """The smallest block within this one whose inputs are right and whose result is wrong; otherwise this one."""
    for index, inner in enumerate(block.inside):
        later = block.inside[index + 1 :]
        if inner.there or inner.gave is None or not inner.given_there or _passed_on(inner, later):
            continue
        if not inner.leaf:
            return _blame(inner)
        if not block.name:  # directly in the root; deeper ones are often part of a fused operator
            return inner
    return block


def _passed_on(block: Block, later: Sequence[Block]) -> bool:
    """Whether the values computed from a block's result are right, so that only the result itself is missing."""
    readers = [other for other in later if any(tensor is block.gave for tensor in other.given)]
    return any(other.there for other in (readers or later))


class _Values:
    """The values of a graph, by size."""

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        self._by_size: dict[int, list[tuple[float, np.ndarray]]] = {}
        self._known: dict[int, float] = {}
        for value in values:
            self.add(value)

    def add(self, value: np.ndarray) -> None:
        if value.dtype == np.float32 and np.isfinite(value).all():
            flat = np.ascontiguousarray(value).reshape(-1)
            self._by_size.setdefault(flat.size, []).append((float(np.linalg.norm(flat)), flat))

    def distance(self, tensor: torch.Tensor) -> float:
        """Relative L2 to the nearest value, in any order of axes."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._nearest(tensor)
        return self._known[id(tensor)]

    def _nearest(self, tensor: torch.Tensor) -> float:
        wanted = tensor.numpy()
        size = float(np.linalg.norm(wanted))
        orders = LAYOUTS.get(wanted.ndim, (tuple(range(wanted.ndim)),))
        ordered = [np.ascontiguousarray(wanted.transpose(order)).reshape(-1) for order in orders]
        nearest = inf
        for norm, value in self._by_size.get(wanted.size, ()):
            if size and abs(norm - size) / size < nearest:  # their norms bound the distance from below
                nearest = min(nearest, *(float(np.linalg.norm(value - each)) / size for each in ordered))
        return nearest
