"""LoRAs in live sessions, bit-identical to `sdflow bake`.

Weights that LoRAs may change are graph inputs (`sdflow.runtime.sessions.live_weights`). They are computed on the device
from the checkpoint by the graph's recipes, and copied into place before the next run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sdflow.artifact import MODEL_FILE
from sdflow.families import DEFAULT
from sdflow.onnx_model.facts import tensor_bytes
from sdflow.onnx_model.files import INLINE_BELOW
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.sessions.live_weights import LiveWeights, over_single_pixels, own_values
from sdflow.serve.engine.cuts import Once
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.weights.half import AtLimit
from sdflow.weights.lora import LoraInput, Loras, Merged, read_loras
from sdflow.weights.recipe import params
from sdflow.weights.stream import THREADS
from sdflow.weights.structure import read_parameters, read_recipe

if TYPE_CHECKING:
    import torch

    from sdflow.sources.loras.layers import Layer
    from sdflow.weights.on_device import Factors
    from sdflow.weights.recipe import Recipe

READERS = frozenset(["Attention", "Conv", "Gemm", "MatMul", "NhwcConv"])
"""Operators that compute the same with a non-constant weight; NhwcConv only for 1x1 kernels (`LiveWeights.open`)."""

LORAS_KEPT = 4
"""Number of LoRAs whose factors stay on the device."""

Layers = Sequence[tuple[Mapping[str, "Layer"], float]]
"""The layers of each LoRA for one submodel, and its scale."""

Names = Mapping[str, frozenset[str]]
"""Initializer names by submodel."""


@dataclass(frozen=True)
class Structure:
    """The graph of a submodel without weights."""

    submodel: str
    folder: Path
    load: Any  # how its checkpoint is loaded
    own: tuple[LoraInput, ...]  # LoRAs built into the pipeline

    @cached_property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters of the module."""
        return read_parameters(self.folder)

    @cached_property
    def own_layers(self) -> Layers:
        """Layers of the LoRAs built into the pipeline."""
        return read_loras(self.submodel, self.own, self.parameters, self.load.get("family", DEFAULT)).layers

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """Recipes of the initializers that are computed from the checkpoint, by name."""
        where = str(self.folder / MODEL_FILE)
        found = ((tensor, read_recipe(tensor, self.parameters, where)) for tensor in self._graph.initializer)
        return {tensor.name: recipe for tensor, recipe in found if recipe is not None}

    @cached_property
    def changeable(self) -> frozenset[str]:
        """Initializers that can become inputs: in the data file, and read only by operators in READERS."""
        readers: dict[str, list[bool]] = {}
        for node in self._graph.node:
            takes = node.op_type in READERS and (node.op_type != "NhwcConv" or over_single_pixels(node))
            for name in node.input:
                readers.setdefault(name, []).append(takes)
        large = {tensor.name for tensor in self._graph.initializer if tensor_bytes(tensor) >= INLINE_BELOW}
        return frozenset(name for name in large & self.recipes.keys() if all(readers.get(name, [False])))

    @cached_property
    def usual(self) -> frozenset[str]:
        """The changeable initializers that most LoRAs target: linear layers and 1x1 convolutions."""
        return frozenset(
            name
            for name in self.changeable
            if all(len(each.shape) > 1 and prod(each.shape[2:]) == 1 for each in params(self.recipes[name]))
        )

    def touched(self, layers: Layers) -> frozenset[str]:
        """Return the initializers that these layers change."""
        keys = {key for held, scale in layers if scale for key in held}
        return frozenset(
            name for name, recipe in self.recipes.items() if any(each.key in keys for each in params(recipe))
        )

    @cached_property
    def _graph(self) -> Any:
        return load_graph(self.folder / MODEL_FILE).graph


class LiveLoras:
    """Sessions of a pipeline whose weights are inputs, and the weights with LoRAs."""

    def __init__(self, folder: Path, base: ServedPipeline, structures: Mapping[str, Structure], names: Names) -> None:
        """names: initializers that may change. Keeps their checkpoint parameters in memory, in the stored type. Raises
        CheckpointError if the files are not those that the pipeline was built with."""
        place = base.base.place
        self.names, self._structures, self._device = names, structures, place.device
        self._kept_factors: dict[str, list[tuple[Mapping[str, Layer], Factors]]] = {}
        with place.current():
            self._live = {}
            for name, wanted in names.items():
                there, model = base.base.submodels[name].weights, (folder / name / MODEL_FILE).resolve()
                own = own_values(model, wanted, place.device) if there is None else there.tensors(wanted)
                self._live[name] = LiveWeights(own)
            self._own = {name: self._read_own(name) for name in names}
        self.pipeline = base.with_submodels(folder, self._live)

    @cached_property
    def size_of_sessions(self) -> int:
        """Bytes in addition to the pipeline without LoRAs: the inputs and the checkpoint's parameters."""
        read: int = sum(values.nbytes for own in self._own.values() for values in own.values())
        return read + sum(each.size for each in self._live.values())

    def covers(self, names: Names) -> bool:
        """Whether these initializers may change."""
        return all(wanted <= self.names.get(name, frozenset()) for name, wanted in names.items())

    def computed(self, names: Names, layers: Mapping[str, Layers], inputs: Sequence[LoraInput]) -> Values:
        """Compute these initializers on the device, with LoRAs in addition to the pipeline's own. layers: by submodel.
        inputs: LoRA files. Raises CheckpointError for non-finite values."""
        import torch

        from sdflow.weights.on_device import evaluate, leaves_of, merged

        device, values = torch.device(self._device), Values()
        with self.pipeline.base.place.current():
            for submodel, wanted in names.items():
                structure = self._structures[submodel]
                held = [*structure.own_layers, *layers[submodel]]
                factors = [(self._factors(submodel, each), scale) for each, scale in held]
                recipes = {name: structure.recipes[name] for name in wanted}
                leaves = [leaf for recipe in recipes.values() for leaf in leaves_of(recipe)]
                found = merged(leaves, self._own[submodel].__getitem__, factors)
                values[submodel] = {
                    name: _by_itself(evaluate(recipe, found.__getitem__, device)) for name, recipe in recipes.items()
                }
            every = [each for found in values.values() for each in found.values()]
            # A sum is finite only if all its values are.
            sums = torch.stack([each.sum(dtype=torch.float32) for each in every]) if every else torch.zeros(0)
            finite = all(torch.isfinite(sums).tolist())
        if not finite:
            self._refuse(values, layers, inputs)
        return values

    def with_values(self, values: Values) -> ServedPipeline:
        def hold() -> None:
            for submodel, live in self._live.items():
                live.hold(values.get(submodel, {}))

        return self.pipeline.holding(hold)

    def forget_factors(self) -> None:
        self._kept_factors.clear()

    def _factors(self, submodel: str, held: Mapping[str, Layer]) -> Factors:
        """Return a LoRA's factors for a submodel, cached on the device by the identity of its layers."""
        import torch

        from sdflow.weights.on_device import Factors

        kept = self._kept_factors.setdefault(submodel, [])
        found = next((each for each in kept if each[0] is held), None)
        if found is None:
            found = held, Factors(held, torch.device(self._device))
        self._kept_factors[submodel] = [*(each for each in kept if each is not found), found][-LORAS_KEPT:]
        return found[1]

    def _read_own(self, submodel: str) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        from sdflow.weights.tensors import open_tensors

        structure = self._structures[submodel]
        keys = {each.key for name in self.names[submodel] for each in params(structure.recipes[name])}
        with (
            open_tensors(submodel, structure.load, structure.parameters) as tensors,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            read = pool.map(lambda key: np.array(tensors.read(key)), sorted(keys))
            return {
                key: torch.from_numpy(values).to(self._device) for key, values in zip(sorted(keys), read, strict=True)
            }

    def _refuse(self, values: Values, layers: Mapping[str, Layers], inputs: Sequence[LoraInput]) -> None:
        """Raise CheckpointError for the first non-finite value, naming its source."""
        import torch

        from sdflow.weights.finite import FiniteWeights
        from sdflow.weights.tensors import open_tensors

        for submodel, found in values.items():
            structure = self._structures[submodel]
            held = Loras([*structure.own_layers, *layers[submodel]])
            with open_tensors(submodel, structure.load, structure.parameters) as tensors:
                finite = FiniteWeights(Merged(tensors, held), [*structure.own, *inputs])
                for name, each in found.items():
                    if not bool(torch.isfinite(each).all()):
                        finite.look_at(structure.recipes[name], each.cpu().numpy(), AtLimit(not_finite=1))


def _by_itself(values: torch.Tensor) -> torch.Tensor:
    """Return the values as C-contiguous memory with a storage of its own."""
    import torch

    alone = values.untyped_storage().nbytes() == values.numel() * values.element_size()
    return values.contiguous() if alone else values.clone(memory_format=torch.contiguous_format)


class Values(dict[str, Mapping[str, "torch.Tensor"]]):
    """Values by submodel and initializer name; a dict that supports weak references."""


class SharedValues(Once[Values]):
    """Weights of a pipeline by LoRAs, alive as long as a lane uses them."""

    def __init__(self) -> None:
        super().__init__(WeakValueDictionary())
