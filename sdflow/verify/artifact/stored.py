"""Compare the weights of a bound model with their recipes, each when its exact values are computed."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sdflow.artifact import MODEL_FILE
from sdflow.errors import CheckpointError, PassError
from sdflow.families import DEFAULT
from sdflow.onnx_model.facts import subgraphs
from sdflow.onnx_model.files import data_span, is_external, raw_values
from sdflow.verify.artifact.blocks_again import blocks_again, one_thread
from sdflow.verify.artifact.quantized import again
from sdflow.verify.artifact.unrounded import rounding_of, rounds, unrounded_values
from sdflow.weights.lora import LoraInput, Merged, read_loras
from sdflow.weights.recipe import (
    Blockwise,
    Quantized,
    Quantizing,
    Recipe,
    Scales,
)
from sdflow.weights.tensors import open_tensors

READERS = 2
"""Threads that compute weights, one weight each at a time."""
AT_ONCE = 1 << 18
"""Values rounded at a time, which stay in the processor's cache."""

Result = TypeVar("Result")

MISSING, DIFFERS = "is missing from the structure", "differs from the structure's"
OTHER_VALUES = "its recipe gives other values than the model has"


@dataclass(frozen=True)
class BoundModel:
    """A model bound from a structure, with its inputs.

    checkpoint: from `open_checkpoint` (`load`). loras: in the workflow's order. denoiser: its config, needed to read
    LoRAs.
    """

    folder: Path
    checkpoint: Mapping[str, Any]
    loras: Sequence[LoraInput] = ()
    denoiser: Mapping[str, Any] = field(default_factory=dict)


class CannotCompute(Exception):
    """A weight cannot be computed from the checkpoint. name: of the tensor; "" if none can."""

    def __init__(self, name: str, why: Exception) -> None:
        super().__init__(f"cannot be computed again: {why}")
        self.name = name


class StoredWeights:
    """The tensors of a bound model, each compared once: a weight when its exact values are first computed, everything
    else by `compare`.

    recipes: the structure's, by tensor name. changed: names of the weights that were rounded to 16 bits or quantized.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        own: Mapping[str, Any],
        folders: tuple[Path, Path],
        recipes: Mapping[str, Recipe],
        read: Callable[[str], NDArray[Any]],
        threads: int,
    ) -> None:
        """tensors, own: of the model and of the structure. folders: of both. read: returns a parameter in float32.
        threads: for blockwise quantization."""
        self.recipes = recipes
        self._tensors, self._own, self._read, self._threads = tensors, own, read, threads
        self._folder, self._structure = folders
        present = [name for name in tensors if name in recipes]
        self.changed = [name for name in present if _is_changed(recipes[name])]
        self._of_source: dict[Any, list[str]] = {}
        for name in present:
            self._of_source.setdefault(_source(name, recipes[name]), []).append(name)
        self._compared: set[str] = set()
        self._problems: dict[str, str] = {}

    @property
    def count(self) -> int:
        """Number of weights compared with their recipes."""
        return len(self._compared)

    @property
    def problems(self) -> Mapping[str, str]:
        """Tensor -> what is wrong with its stored values, in the order of the graph."""
        return {name: self._problems[name] for name in {**self._own, **self._tensors} if name in self._problems}

    def exact(self, name: str) -> NDArray[Any]:
        """A weight before rounding or quantization. The first time, the stored values are compared. Thread-safe. Raises
        CannotCompute."""
        with _naming(name):
            recipe = self.recipes[name]
            exact = unrounded_values(recipe, self._read)
            if name not in self._compared:
                self._compare_all(self._of_source[_source(name, recipe)], exact)
            return exact

    def compare(self) -> None:
        """Compare all tensors that were not compared yet. Memory: a few of the largest. Raises CannotCompute.

        A tensor without a recipe belongs to the graph and must equal the structure's.
        """
        for name in self._own:
            if name not in self._tensors:
                what = "a recipe for it" if name in self.recipes else "it"
                self._problems[name] = f"the structure has {what}, but the model has no such tensor"
        for name in self._tensors.keys() - self.recipes.keys():
            if name not in self._own:
                self._problems[name] = f"it has no recipe and {MISSING}"
                continue
            with _naming(name):
                if _bytes(self._tensors[name], self._folder) != _bytes(self._own[name], self._structure):
                    self._problems[name] = f"it belongs to the graph, but {DIFFERS}"
        left = [names[0] for names in self._of_source.values() if names[0] not in self._compared]
        for _ in ahead(self.exact, left):
            pass

    def _compare_all(self, names: Sequence[str], exact: NDArray[Any]) -> None:
        """Compare tensors that store the same values: a quantized weight has scales."""
        first, parts = self.recipes[names[0]], dict[Any, NDArray[Any]]()
        if isinstance(first, Quantized | Scales):
            parts[Quantized], parts[Scales] = again(first.kind, exact, first.axis)
        elif isinstance(first, Blockwise):
            parts.update(blocks_again(exact, first.how, self._threads))
        for name in names:
            recipe = self.recipes[name]
            wanted, stored_as = rounding_of(recipe, exact, self._read)
            if isinstance(recipe, Quantizing):
                wanted = parts[recipe.part if isinstance(recipe, Blockwise) else type(recipe)]
            if not _holds(self._tensors[name], self._folder, wanted, stored_as):
                self._problems[name] = OTHER_VALUES
        self._compared.update(names)


@contextmanager
def stored_weights(
    submodel: str, structure: Path, recipes: Mapping[str, Recipe], parameters: Mapping[str, Any], bound: BoundModel
) -> Iterator[StoredWeights]:
    """Open the weights of the bound model for comparison. recipes: the structure's, by tensor name. Raises CannotCompute
    if something cannot be read, or a file of the checkpoint changes."""
    import onnx

    folders = bound.folder, structure
    with ExitStack() as stack:
        with _naming(""):
            tensors, own = (
                _tensors(onnx.load(str(folder / MODEL_FILE), load_external_data=False)) for folder in folders
            )
            read = stack.enter_context(_reading(submodel, parameters, bound))
        by_blocks = any(isinstance(recipe, Blockwise) for recipe in recipes.values())
        threads = stack.enter_context(one_thread()) if by_blocks else 1
        yield StoredWeights(tensors, own, folders, recipes, read, threads)
        with _naming(""):
            stack.close()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise errors of reading as CannotCompute."""
    try:
        yield
    except (CheckpointError, PassError, OSError, ValueError) as error:
        raise CannotCompute(name, error) from error


def ahead(work: Callable[[str], Result], names: Iterable[str]) -> Iterator[Result]:
    """Yield `work`'s result for each name, in order, while READERS threads compute the next ones."""
    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[Future[Result]] = deque()
        for name in names:
            waiting.append(pool.submit(work, name))
            if len(waiting) > READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _reading(
    submodel: str, parameters: Mapping[str, Any], bound: BoundModel
) -> Iterator[Callable[[str], NDArray[Any]]]:
    """Yield a function that reads a parameter in float32, with LoRAs merged."""
    import torch

    with open_tensors(submodel, bound.checkpoint, parameters) as checkpoint, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )  # a map of the checkpoint's file
        merged = Merged(
            checkpoint, read_loras(submodel, bound.loras, parameters, bound.checkpoint.get("family", DEFAULT))
        )

        def read(key: str) -> NDArray[Any]:
            values: NDArray[Any] = torch.from_numpy(merged.read(key)).float().numpy()
            return values

        yield read


class ExactWeights(Mapping[str, "NDArray[Any]"]):
    """Weights before rounding or quantization, each computed on access."""

    def __init__(self, weights: StoredWeights, names: Iterable[str]) -> None:
        self._weights, self._names = weights, dict.fromkeys(names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._weights.exact(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_changed(recipe: Recipe) -> bool:
    """Whether a recipe rounds or quantizes values; scales are not weights."""
    if isinstance(recipe, Quantizing):
        return isinstance(recipe, Quantized) or (isinstance(recipe, Blockwise) and recipe.part == "values")
    return rounds(recipe)


def _source(name: str, recipe: Recipe) -> Any:
    """What tensors that store the same values have in common."""
    if isinstance(recipe, Blockwise):
        return recipe.how, recipe.of
    return (recipe.kind, recipe.axis, recipe.of) if isinstance(recipe, Quantized | Scales) else name


def _tensors(model: Any) -> dict[str, Any]:
    """Every tensor of a graph: initializers by their names, constants by the value and the attribute of their node."""
    found: dict[str, Any] = {}
    for graph in subgraphs(model.graph):
        found |= {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            found |= {f"{node.output[0]}.{item.name}": item.t for item in node.attribute if item.HasField("t")}
    return found


def _holds(tensor: Any, folder: Path, values: NDArray[Any], stored_as: Callable[[NDArray[Any]], NDArray[Any]]) -> bool:
    """Whether a TensorProto holds exactly these values, as `stored_as` rounds them. Large ones are rounded and compared
    in place, AT_ONCE at a time."""
    if not is_external(tensor):
        return _bytes(tensor, folder) == stored_as(values).tobytes()
    location, offset, _ = data_span(tensor)
    flat = values.reshape(-1)
    kind = f"u{stored_as(flat[:0]).itemsize}"
    if not flat.size or (folder / location).stat().st_size < offset + flat.size * np.dtype(kind).itemsize:
        return not flat.size
    stored = np.memmap(folder / location, kind, "r", offset, (flat.size,))
    return all(
        np.array_equal(stored[begin : begin + AT_ONCE], stored_as(flat[begin : begin + AT_ONCE]).view(kind))
        for begin in range(0, flat.size, AT_ONCE)
    )


def _bytes(tensor: Any, folder: Path) -> bytes:
    """The raw bytes of a TensorProto, which is not changed. Raises PassError if a file is too short."""
    import onnx

    if not is_external(tensor) and tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    return raw_values(copy, folder)
