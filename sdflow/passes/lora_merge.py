"""LoraMerge: merge LoRAs into the weights of an exported model (`sdflow/weights/lora.py`), without exporting again.

It follows OnnxConversion, so a checkpoint is exported once for all its LoRAs. Untouched weights are copied byte for
byte; an untouched submodel is unchanged, so later steps need not run again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE, Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import write_graph
from sdflow.passes.base import EDITS_GRAPH, InputKind, Pass, PassConfig, PassInputs
from sdflow.passes.olive import copy_companions
from sdflow.passes.weight_names import WeightName, read_weight_names, weight_span

if TYPE_CHECKING:
    import numpy as np

    from sdflow.sources.loras.layers import Layer
    from sdflow.weights.lora import LoraInput

COPY_BLOCK = 1 << 20

_Lora = tuple[Mapping[str, "Layer"], float]
"""A LoRA's layers for this submodel, by state_dict key, and its scale."""


class LoraMergeConfig(PassConfig):
    """No options: LoRAs and scales are set for the whole pipeline, under `loras:`."""


class LoraMerge(Pass[LoraMergeConfig]):
    """Merges the LoRAs' parts for this submodel in float32; other files are copied.

    The model is streamed; peak memory is the LoRAs' tensors and three times the largest touched weight. A LoRA at scale
    0 changes no bit. Facts, besides the graph's: `loras`, number of weights that each touched, in order; `touched`,
    weights that any touched; `touched_bytes`.
    """

    name: ClassVar[str] = "LoraMerge"
    version: ClassVar[int] = 3
    uses: ClassVar[tuple[str, ...]] = ("numpy", "onnx")
    imports = EDITS_GRAPH
    accepts: ClassVar[InputKind] = "onnx"
    takes_loras: ClassVar[bool] = True
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = LoraMergeConfig

    def run(self, inputs: PassInputs, out: Path, config: LoraMergeConfig) -> Facts:
        """Raises CheckpointError if a LoRA's tensor has no place in the model or makes a weight infinite, and PassError
        if the model's weights are not as OnnxConversion wrote them."""
        import onnx

        from sdflow.families import FAMILIES
        from sdflow.sources.loras.lora import read_lora

        if inputs.model is None:
            raise PassError("has no model to merge into", where=self.name, remedy="Put it right after OnnxConversion.")
        if inputs.submodel not in FAMILIES[inputs.family].with_loras:
            raise PassError(
                f"no LoRA has a part for the {inputs.submodel}",
                where=self.name,
                remedy="Remove the pass from this chain.",
            )
        names = read_weight_names(inputs.model)
        model = onnx.load(str(inputs.model / MODEL_FILE), load_external_data=False)
        inputs.progress("reading the LoRAs")
        shapes = {name.key: name.shape for name in names.values()}
        loras = [
            (read_lora(lora.path, {inputs.submodel: shapes}, inputs.family)[inputs.submodel], lora.scale)
            for lora in inputs.loras
        ]
        touched = {key for layers, scale in loras if scale for key in layers}
        weights = [_Weight(tensor, names[tensor.name]) for tensor in model.graph.initializer if tensor.name in names]
        targets = [weight for weight in weights if weight.name.key in touched]
        _require_unchanged(targets, touched)
        inputs.progress(f"merging into {len(targets)} weights")
        _merge(model, targets, loras, inputs.loras, inputs.model, out)
        copy_companions(inputs.model, out)
        return {
            **graph_facts(out / MODEL_FILE),
            "loras": [len(layers) if scale else 0 for layers, scale in loras],
            "touched": len(targets),
            "touched_bytes": sum(4 * math.prod(weight.name.shape) for weight in targets),
        }


@dataclass(frozen=True)
class _Weight:
    """An initializer (onnx.TensorProto) that holds a parameter."""

    tensor: Any
    name: WeightName


def _require_unchanged(targets: Sequence[_Weight], touched: Set[str]) -> None:
    """Raise PassError unless every touched parameter is an initializer as written by OnnxConversion."""
    import onnx

    changed = sorted(touched - {target.name.key for target in targets})
    changed += [
        target.tensor.name
        for target in targets
        if target.tensor.data_type != onnx.TensorProto.FLOAT or tuple(target.tensor.dims) != target.name.stored_shape
    ]
    if changed:
        raise PassError(
            f"{len(changed)} weights are not as OnnxConversion wrote them, the first is {changed[0]}",
            where=LoraMerge.name,
            remedy="Put LoraMerge right after OnnxConversion, before passes that fuse or convert weights.",
        )


def _merge(
    model: Any, targets: Sequence[_Weight], loras: Sequence[_Lora], files: Sequence[LoraInput], source: Path, out: Path
) -> None:
    """Write the graph and its data file to `out`. Values stored in the data file are changed in one streaming pass."""
    import numpy as np

    from sdflow.weights.finite import all_finite, refused_lora
    from sdflow.weights.lora import Loras, merged_weight

    def merged(target: _Weight, values: bytes) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            name = target.name
            layers = [(held[name.key], scale) for held, scale in loras if scale and name.key in held]
            stored = np.frombuffer(values, "<f4").reshape(name.stored_shape)
            total = np.ascontiguousarray(name.apply(merged_weight(name.undo(stored), layers)))
        if not all_finite(total):
            refused = refused_lora(target.name.key, target.name.shape, Loras(loras), files)
            assert refused is not None, "a LoRA touches it"
            raise refused
        return total

    external = []
    for target in targets:
        span = weight_span(target.tensor)
        if span is None:
            target.tensor.raw_data = merged(target, target.tensor.raw_data).tobytes()
        else:
            external.append((*span, target))
    if len(external) < len(targets):
        write_graph(model, out)
    else:
        shutil.copyfile(source / MODEL_FILE, out / MODEL_FILE)
    if not (source / WEIGHTS_FILE).exists():
        return
    with (source / WEIGHTS_FILE).open("rb") as read, (out / WEIGHTS_FILE).open("wb") as write:
        for offset, length, target in sorted(external, key=lambda entry: entry[0]):
            _copy(read, write, offset - read.tell())
            write.write(merged(target, _read(read, length)).data)
        shutil.copyfileobj(read, write, COPY_BLOCK)


def _copy(read: IO[bytes], write: IO[bytes], length: int) -> None:
    while length:
        block = _read(read, min(length, COPY_BLOCK))
        write.write(block)
        length -= len(block)


def _read(read: IO[bytes], length: int) -> bytes:
    values = read.read(length)
    if len(values) != length:
        raise PassError("is shorter than the graph requires", where=WEIGHTS_FILE, remedy="Rebuild the previous step.")
    return values
