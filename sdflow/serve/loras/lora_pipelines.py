"""Pipelines with LoRAs, created while other images run, bit-identical to `sdflow bake`.

Weights with LoRAs are always computed from the checkpoint by the graph's recipes, never from existing weights. If the
graph allows it, they go into live sessions (`live_loras.py`) shared by all LoRAs, otherwise into files for separate
sessions (`sdflow.weights.bind`). Unchanged submodels are shared. The graph comes from the cache, without an export.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from weakref import WeakValueDictionary, finalize

from sdflow.digest import digest_file
from sdflow.errors import CheckpointError, os_errors_as
from sdflow.serve.engine.cuts import Once
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.jobs import LoraFile
from sdflow.serve.loras.live_loras import Layers, LiveLoras, Names, SharedValues, Structure
from sdflow.serve.loras.lora_structures import Read, read_structures
from sdflow.sources.loras.layers import DifferenceLayer, Layer
from sdflow.sources.loras.lora import read_lora, require_made_for
from sdflow.weights.lora import LoraInput

LORAS_READ = 8
"""Number of LoRA files kept in memory."""

COPIES = 2
"""Approximate copies of a submodel's weights in memory: the session of each batch size may pack its own."""


@dataclass(frozen=True)
class Made:
    """A pipeline with LoRAs. size: approximate bytes of its weights. unused: whether no other shares its sessions."""

    loras: tuple[LoraFile, ...]
    pipeline: ServedPipeline
    size: int
    unused: bool


@dataclass(frozen=True)
class Wanted:
    """The changes that LoRAs make."""

    loras: tuple[LoraFile, ...]
    names: Names  # initializers by submodel
    layers: Mapping[str, Layers]  # by submodel
    live: bool  # whether live sessions can take all changes


@dataclass(eq=False)
class LoraPipelines:
    """The pipeline of a folder with any LoRAs. The most recently used ones are kept, up to `memory` bytes of weights.

    cache: the cache that the folder was built with, read on the first LoRA. values: shared by all lanes. `read` and
    `carry_out` may run in another thread than the other methods, `forget` in any. Methods raise UsageError if the
    pipeline cannot take LoRAs or its graphs are not in the cache, CheckpointError for a LoRA that does not fit.
    """

    folder: Path
    base: ServedPipeline
    cache: Path
    memory: int
    values: SharedValues = field(default_factory=SharedValues)
    _live: LiveLoras | None = None
    _files_alone: bool = False
    _read: Once[Mapping[str, Mapping[str, Layer]]] = field(default_factory=lambda: Once({}, LORAS_READ))
    _made: dict[tuple[LoraFile, ...], Made] = field(default_factory=dict)
    _alive: WeakValueDictionary[tuple[LoraFile, ...], ServedPipeline] = field(default_factory=WeakValueDictionary)
    _forgotten: set[str] = field(default_factory=set)
    _lock: RLock = field(default_factory=RLock)

    @cached_property
    def built_from(self) -> Read:
        """The checkpoint, and the graphs that LoRAs apply to."""
        return read_structures(self.folder, self.cache)

    @property
    def _structures(self) -> Mapping[str, Structure]:
        return self.built_from[1]

    @property
    def there(self) -> list[ServedPipeline]:
        return [made.pipeline for made in list(self._made.values())]

    def served(self, loras: tuple[LoraFile, ...]) -> ServedPipeline:
        """Return the pipeline with these LoRAs in this order, creating it if necessary."""
        found = self.get(loras)
        return self.keep(self.carry_out(self.read(loras))) if found is None else found

    def get(self, loras: tuple[LoraFile, ...]) -> ServedPipeline | None:
        """Return the pipeline with these LoRAs if it exists, kept or in use."""
        loras = _counting(loras)
        if not loras:
            return self.base
        with self._lock:
            if loras in self._made:
                self._made[loras] = self._made.pop(loras)
            return self._alive.get(loras)

    def keep(self, made: Made) -> ServedPipeline:
        """Keep a pipeline unless a LoRA of it is forgotten, and drop the least recently used ones above the limit."""
        with self._lock:
            left = self.memory - self.size_of_sessions - made.size
            while self._made and sum(each.size for each in self._made.values()) > left:
                self._made.pop(next(iter(self._made)))
            if self._forgotten.isdisjoint(each.path for each in made.loras):
                self._made[made.loras] = made
            self._alive[made.loras] = made.pipeline
        return made.pipeline

    def forget(self, path: str) -> None:
        """Drop everything made with this LoRA file, including what is in progress, until it is read again."""
        with self._lock:
            self._forgotten.add(path)
            self._read = Once({}, LORAS_READ)
            if self._live is not None:
                self._live.forget_factors()
            self._made = {loras: made for loras, made in self._made.items() if all(each.path != path for each in loras)}

    @property
    def size_of_sessions(self) -> int:
        """Bytes of the sessions shared by all LoRAs, in addition to the pipeline."""
        return 0 if self._live is None else self._live.size_of_sessions

    def read(self, loras: tuple[LoraFile, ...]) -> Wanted:
        """Return the changes that these LoRAs make, without using the device."""
        loras = _counting(loras)
        with self._lock:
            self._forgotten.difference_update(each.path for each in loras)
        held = [self._layers(lora) for lora in loras]
        both = list(zip(held, [lora.scale for lora in loras], strict=True))
        layers: dict[str, Layers] = {name: [(each[name], scale) for each, scale in both] for name in self._structures}
        names = {name: found for name, each in self._structures.items() if (found := each.touched(layers[name]))}
        # Difference layers are read from their file lazily. Only `_written` checks afterwards that it is unchanged.
        every = [each for found in held for layer in found.values() for each in layer.values()]
        changeable = all(wanted <= self._structures[name].changeable for name, wanted in names.items())
        live = changeable and not self.base.why_alone and not any(isinstance(each, DifferenceLayer) for each in every)
        return Wanted(loras, names, layers, live)

    def carry_out(self, wanted: Wanted) -> Made:
        """Create the pipeline with these changes."""
        loras, names = wanted.loras, wanted.names
        before, live = self._live, self._live_for(names) if wanted.live else None
        if live is None:
            return self._written(loras, list(names))
        values = self.values.get(loras, lambda: live.computed(names, wanted.layers, _inputs(loras)))
        size = sum(each.nbytes for found in values.values() for each in found.values())
        return Made(loras, live.with_values(values), size, live is not before)

    def prepare(self) -> ServedPipeline | None:
        """Create the live sessions ahead of the first LoRA. Return their pipeline, or None if not possible."""
        live = None if self.base.why_alone is not None else self._live_for({})
        return None if live is None else live.pipeline

    def use_files(self) -> None:
        """Stop using live sessions and release them: each combination of LoRAs gets its own files and sessions."""
        self._files_alone, self._live = True, None

    def _live_for(self, names: Names) -> LiveLoras | None:
        """Return sessions in which these initializers may change, or None. Rarely changed ones need new sessions."""
        if self._files_alone:
            return None
        if self._live is None or not self._live.covers(names):
            before = {} if self._live is None else self._live.names
            wanted = {
                name: each.usual | before.get(name, frozenset()) | names.get(name, frozenset())
                for name, each in self._structures.items()
            }
            self._live = LiveLoras(self.folder, self.base, self._structures, wanted)
        return None if self._live.pipeline.why_alone else self._live

    def _layers(self, lora: LoraFile) -> Mapping[str, Mapping[str, Layer]]:
        """Return a LoRA's layers by submodel. They are small, so the last few stay in memory."""

        def read() -> Mapping[str, Mapping[str, Layer]]:
            path, checkpoint = Path(lora.path), self.built_from[0]
            require_made_for(path, checkpoint)
            shapes = {name: each.parameters for name, each in self._structures.items()}
            found = read_lora(path, shapes, checkpoint.family.name)
            _require_same(lora)
            return found

        return self._read.get(lora.sha256, read)

    def _written(self, loras: tuple[LoraFile, ...], touched: Sequence[str]) -> Made:
        """Create a pipeline with separate submodels whose weights are written to files."""
        from sdflow.weights.bind import BindRequest, bind

        scratch = Path(tempfile.mkdtemp(prefix="sdflow-loras-"))
        try:
            for name in touched:
                structure, out = self._structures[name], scratch / name
                out.mkdir()
                every, there = (*structure.own, *_inputs(loras)), (self.folder / name).resolve()
                bind(BindRequest(name, structure.folder, structure.load, every, there, base_loras=structure.own), out)
            for lora in loras:
                _require_same(lora)
            made = self.base.with_submodels(scratch, dict.fromkeys(sorted(touched)))
        except BaseException:
            shutil.rmtree(scratch)
            raise
        finalize(made, shutil.rmtree, scratch, ignore_errors=True)
        size = COPIES * sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        return Made(loras, made, size, unused=True)


def _require_same(lora: LoraFile) -> None:
    """Raise CheckpointError if the file changed since the request: contents are cached by its digest."""
    with os_errors_as("cannot be read", lora.path, kind=CheckpointError):
        found = digest_file(Path(lora.path))
    if found != lora.sha256:
        raise CheckpointError("changed while it was being read", where=lora.path, remedy="Try again.")


def _inputs(loras: Sequence[LoraFile]) -> list[LoraInput]:
    return [LoraInput(Path(lora.path), lora.scale) for lora in loras]


def _counting(loras: Sequence[LoraFile]) -> tuple[LoraFile, ...]:
    """Drop LoRAs with scale 0."""
    return tuple(lora for lora in loras if lora.scale)
