"""Compare the weights of a bound model with their recipes: before rounding, and rounded by torch.

Rounding commutes with operations that only move values. So a recipe is evaluated once in float32 and its result rounded
here, independently of the code under test (`sdflow.weights.half`).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sdflow.artifact import MODEL_FILE
from sdflow.families import DEFAULT
from sdflow.onnx_model.facts import subgraphs
from sdflow.onnx_model.files import data_span, is_external, raw_values
from sdflow.verify.artifact.blocks_again import blocks_again, one_thread
from sdflow.verify.artifact.quantized import again
from sdflow.weights.evaluate import evaluate
from sdflow.weights.lora import LoraInput, Merged, read_loras
from sdflow.weights.recipe import (
    Bfloat16,
    Blockwise,
    Constant,
    Float16,
    Join,
    Quantized,
    Quantizing,
    Recipe,
    Reshape,
    Rotated,
    Scaled,
    Scales,
    Sum,
    Transpose,
)
from sdflow.weights.tensors import open_tensors

BFLOAT16 = (0.0, float("inf"))
"""Limits of a rounding to bfloat16: none."""

READERS = 2
"""Threads that compute weights, one weight each at a time."""

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


@dataclass(frozen=True)
class Stored:
    """A tensor of a bound model. exact: its values before rounding to 16 bits or quantization; None if neither
    happened, or it has no recipe. problem: of the stored values, or ""."""

    name: str
    exact: NDArray[Any] | None
    problem: str


def stored_weights(
    submodel: str, structure: Path, recipes: Mapping[str, Recipe], parameters: Mapping[str, Any], bound: BoundModel
) -> Iterator[Stored]:
    """Yield every tensor of the bound model. recipes: the structure's, by tensor name.

    A tensor without a recipe belongs to the graph and must equal the structure's. Memory: a few of the largest tensors,
    and whatever the caller keeps. Raises CheckpointError, PassError, OSError or ValueError if something cannot be read.
    """
    import onnx

    own = _tensors(onnx.load(str(structure / MODEL_FILE), load_external_data=False))
    model = _tensors(onnx.load(str(bound.folder / MODEL_FILE), load_external_data=False))
    for name in own.keys() - model.keys():
        what = "a recipe for it" if name in recipes else "it"
        yield Stored(name, None, f"the structure has {what}, but the model has no such tensor")
    by_blocks = any(isinstance(recipe, Blockwise) for recipe in recipes.values())
    with _reading(submodel, parameters, bound) as read, one_thread() if by_blocks else nullcontext(1) as threads:
        latest = _Latest(read, threads)

        def stored(name: str) -> Stored | None:
            tensor, recipe = model[name], recipes.get(name)
            if isinstance(recipe, Blockwise):
                exact, bits = latest.blocks(recipe)
                same = _same_bytes(tensor, bound.folder, bits[recipe.part])
                return Stored(name, exact if recipe.part == "values" else None, "" if same else OTHER_VALUES)
            if recipe is not None:
                return _by_recipe(name, tensor, bound.folder, recipe, read)
            if name not in own:
                return Stored(name, None, f"it has no recipe and {MISSING}")
            if _bytes(tensor, bound.folder) != _bytes(own[name], structure):
                return Stored(name, None, f"it belongs to the graph, but {DIFFERS}")
            return None

        yield from (each for each in ahead(stored, model) if each is not None)


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


class _Latest:
    """The most recent blockwise quantized weights, whose values, scales and zeros are adjacent. Two are kept, since one
    thread may already be at the next weight."""

    def __init__(self, read: Callable[[str], NDArray[Any]], threads: int) -> None:
        self._read, self._threads = read, threads
        self._lock = Lock()
        self._found: list[tuple[Any, tuple[NDArray[Any], Mapping[str, NDArray[Any]]]]] = []

    def blocks(self, recipe: Blockwise) -> tuple[NDArray[Any], Mapping[str, NDArray[Any]]]:
        """The values to quantize, and the bits of the three parts."""
        key = recipe.how, recipe.of
        with self._lock:
            found = next((each for known, each in self._found if known == key), None)
            if found is None:
                del self._found[:-1]  # before computing the next one
                exact = _exact(recipe, self._read)
                found = exact, blocks_again(exact, recipe.how, self._threads)
                self._found.append((key, found))
            return found


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
    """Weights of a bound model before rounding or quantization, each computed on access."""

    def __init__(self, recipes: Mapping[str, Recipe], read: Callable[[str], NDArray[Any]]) -> None:
        self._recipes, self._read = recipes, read

    def __getitem__(self, name: str) -> NDArray[Any]:
        return _exact(self._recipes[name], self._read)

    def __contains__(self, name: object) -> bool:
        return name in self._recipes

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)


@contextmanager
def exact_weights(
    submodel: str, recipes: Mapping[str, Recipe], parameters: Mapping[str, Any], bound: BoundModel
) -> Iterator[ExactWeights]:
    """The weights of these recipes that are rounded or quantized. Raises like `stored_weights`."""
    changed = {
        name: recipe
        for name, recipe in recipes.items()
        if isinstance(recipe, Quantized | Blockwise) or _limits(recipe) != {None}
    }
    with _reading(submodel, parameters, bound) as read:
        yield ExactWeights(changed, read)


def _exact(recipe: Recipe, read: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """Evaluate a recipe in float32 without its roundings; for a quantizing one, its input."""
    of = recipe.of if isinstance(recipe, Quantizing) else recipe
    values = evaluate(unrounded(of), read)
    if values.dtype == np.float32 and not values.flags.c_contiguous:
        import torch

        values = torch.from_numpy(values).contiguous().numpy()  # transposed in a quarter of numpy's time
    return np.ascontiguousarray(values)


def _by_recipe(name: str, tensor: Any, folder: Path, recipe: Recipe, read: Callable[[str], NDArray[Any]]) -> Stored:
    exact = _exact(recipe, read)
    if isinstance(recipe, Quantized | Scales):
        values, scales = again(recipe.kind, exact, recipe.axis)
        wanted = values if isinstance(recipe, Quantized) else scales
        known = exact if isinstance(recipe, Quantized) else None
        return Stored(name, known, "" if _same_bytes(tensor, folder, wanted) else OTHER_VALUES)
    limits = _limits(recipe)
    if limits == {None}:
        wanted, exact_values = exact, None
    elif len(limits) == 1:
        (pair,) = limits
        assert pair is not None
        wanted, exact_values = as_bfloat16(exact) if pair == BFLOAT16 else rounded(exact, *pair), exact
    else:  # rounded in some parts only: cannot be separated
        wanted, exact_values = np.ascontiguousarray(evaluate(recipe, read)), exact
    return Stored(name, exact_values, "" if _same_bytes(tensor, folder, wanted) else OTHER_VALUES)


def unrounded(recipe: Recipe) -> Recipe:
    """The recipe without its roundings, in float32 throughout."""
    match recipe:
        case Float16() | Bfloat16():
            return unrounded(recipe.of)
        case Transpose():
            return Transpose(recipe.axes, unrounded(recipe.of))
        case Reshape():
            return Reshape(recipe.shape, unrounded(recipe.of))
        case Join():
            return Join(recipe.axis, tuple(unrounded(part) for part in recipe.parts))
        case Sum():
            return Sum(tuple(unrounded(part) for part in recipe.parts))
        case Scaled():
            return Scaled(recipe.power, unrounded(recipe.of))
        case Rotated():
            return Rotated(recipe.axis, recipe.size, unrounded(recipe.of))
        case Constant(dtype="float16"):
            wide = np.frombuffer(recipe.raw, "<f2").astype("<f4")
            return Constant(wide.tobytes(), recipe.shape, "float32")
    return recipe


def _limits(recipe: Recipe) -> set[tuple[float, float] | None]:
    """The limits of the roundings that the values pass; None for values that pass none."""
    match recipe:
        case Bfloat16():
            return {BFLOAT16, *(_limits(recipe.of) - {None})}
        case Float16():
            return {(recipe.smallest, recipe.largest), *(_limits(recipe.of) - {None})}
        case Transpose() | Reshape():
            return _limits(recipe.of)
        case Join():
            return {limits for part in recipe.parts for limits in _limits(part)}
        case Sum():
            inner = {limits for part in recipe.parts for limits in _limits(part)} - {None}
            return {None, *inner}
        case Constant(dtype="float16"):
            return set()
    return {None}


def as_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """Round to bfloat16, as uint16, since numpy lacks the type."""
    import torch

    bits: NDArray[Any] = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    return bits


def rounded(values: NDArray[Any], smallest: float, largest: float) -> NDArray[Any]:
    """Round to float16; values beyond the limits become the limits, except 0 and non-finite ones."""
    import torch

    half: NDArray[Any] = torch.from_numpy(values).half().numpy()
    # Rounding is monotonic: values beyond a limit round to it or beyond.
    low, high = (int(np.float16(limit).view(np.uint16)) for limit in (smallest, largest))
    size = half.view(np.uint16).reshape(-1) & np.uint16(0x7FFF)
    suspects = np.flatnonzero((size <= low) | (size >= high))
    exact = values.reshape(-1)[suspects]
    magnitude = np.abs(exact)
    for limit, beyond in ((largest, magnitude > np.float32(largest)), (smallest, magnitude < np.float32(smallest))):
        changed = beyond & (magnitude > 0) & np.isfinite(magnitude)
        half.reshape(-1)[suspects[changed]] = np.copysign(np.float16(limit), exact[changed])
    return half


def _tensors(model: Any) -> dict[str, Any]:
    """Every tensor of a graph: initializers by their names, constants by the value and the attribute of their node."""
    found: dict[str, Any] = {}
    for graph in subgraphs(model.graph):
        found |= {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            found |= {f"{node.output[0]}.{item.name}": item.t for item in node.attribute if item.HasField("t")}
    return found


def _same_bytes(tensor: Any, folder: Path, wanted: NDArray[Any]) -> bool:
    """Whether a TensorProto holds exactly these values. Large ones are compared in place."""
    if not is_external(tensor):
        return _bytes(tensor, folder) == wanted.tobytes()
    location, offset, _ = data_span(tensor)
    if not wanted.nbytes or (folder / location).stat().st_size < offset + wanted.nbytes:
        return not wanted.nbytes
    kind = f"u{wanted.itemsize}"
    stored = np.memmap(folder / location, kind, "r", offset, (wanted.size,))
    return bool(np.array_equal(stored, wanted.view(kind).reshape(-1)))


def _bytes(tensor: Any, folder: Path) -> bytes:
    """The raw bytes of a TensorProto, which is not changed. Raises PassError if a file is too short."""
    import onnx

    if not is_external(tensor) and tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    return raw_values(copy, folder)
