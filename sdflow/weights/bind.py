"""Bind a structure and a checkpoint into a model: evaluate the recipes and stream the results to the data file.

The result is byte-identical to what the chain's passes write when they carry the weights. Memory is bounded by the
largest tensors. A model with other LoRAs can be derived from an existing one of the same structure: tensors that no
LoRA touches in either are copied from its data file, which is verified meanwhile against its digest or its recorded
page sums. That reads the whole file, so if little would be copied, everything is computed instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE, Facts
from sdflow.errors import DamagedBase, PassError
from sdflow.families import DEFAULT
from sdflow.onnx_model.facts import graph_facts, tensor_bytes
from sdflow.onnx_model.files import INLINE_BELOW, initializers_and_constants, set_external, write_graph
from sdflow.onnx_model.reading import load_graph
from sdflow.units import spell_bytes
from sdflow.weights.lora import LoraInput
from sdflow.weights.stream import Piece, write_pieces
from sdflow.weights.structure import PARAMETERS_FILE, REMEDY, read_parameters, read_recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdflow.weights.blockwise import Lately
    from sdflow.weights.half import AtLimit
    from sdflow.weights.lora import LoraInput, Merged
    from sdflow.weights.recipe import Recipe


RESERVE = 64 << 20
"""Bytes to keep free on the disk, for graphs, records and results."""

LEAST_COPIED = 0.25
"""Share of the data file from which a base that must be verified is used."""


@dataclass(frozen=True)
class BindRequest:
    """Input of `bind`.

    structure: a directory that passes wrote under `without_weights()`. checkpoint: from `open_checkpoint` (`load`).
    loras: in the workflow's order. base: a model bound from the same structure and checkpoint, with `base_loras`.
    base_sha256: expected digest of its data file. base_sums: expected page sums, if known; the file is then not hashed.
    progress: called with the bytes written so far and in total. hashed: called with name and SHA-256 of the data file.
    summed: called with the `PageSums` of the data file, and the base's if that was hashed.
    """

    submodel: str
    structure: Path
    checkpoint: Mapping[str, Any]
    loras: Sequence[LoraInput] = ()
    base: Path | None = None
    base_loras: Sequence[LoraInput] = ()
    base_sha256: str | None = None
    base_sums: str | None = None
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)
    hashed: Callable[[str, str], None] = field(default=lambda name, sha256: None)
    summed: Callable[[str, str | None], None] = field(default=lambda sums, base_sums: None)


@dataclass(frozen=True)
class _Job:
    """A tensor to fill: from its recipe, or with the graph's own values if the recipe is None.

    length: size in the data file; None if it stays in the graph file.
    """

    tensor: Any
    recipe: Recipe | None
    values: bytes
    length: int | None


def bind(request: BindRequest, out: Path) -> Facts:
    """Write model.onnx, model.onnx.data and the structure's other files into the empty directory `out`.

    Returns the graph's facts, `computed` (weights not copied from the base), `at_limit` (as in OnnxFloatToFloat16; with
    float16 and without a base), `beyond_float16` of the computed weights, and with LoRAs `loras` (number of weights
    that each touched) and `touched`.
    Raises CheckpointError if the checkpoint or a LoRA does not fit the architecture or gives non-finite values,
    DamagedBase if the base does not match `base_sha256` or `base_sums`, and PassError if the structure is damaged or
    the disk is full.
    """

    from sdflow.weights.blockwise import Lately
    from sdflow.weights.finite import FiniteWeights
    from sdflow.weights.half import AtLimit
    from sdflow.weights.lora import Merged, read_loras
    from sdflow.weights.recipe import Blockwise, Quantized, Scales, params
    from sdflow.weights.tensors import open_tensors

    parameters = read_parameters(request.structure)
    model = load_graph(request.structure / MODEL_FILE)
    jobs = _lay_out(model, parameters, request.structure)
    size = sum(job.length or 0 for job in jobs)
    _require_space(out, size)
    family = request.checkpoint.get("family", DEFAULT)
    loras = read_loras(request.submodel, request.loras, parameters, family)
    touched = loras.touched | read_loras(request.submodel, request.base_loras, parameters, family).touched
    if request.base is not None:
        _require_same_layout(request.base, size)

    def untouched(job: _Job) -> bool:
        return job.recipe is None or touched.isdisjoint(param.key for param in params(job.recipe))

    verified = request.base_sha256 or request.base_sums
    unchanged = [job for job in jobs if job.length and untouched(job)]
    costly = any(isinstance(job.recipe, Quantized | Scales | Blockwise) for job in unchanged)
    if verified and not costly and sum(job.length or 0 for job in unchanged) < LEAST_COPIED * size:
        request = replace(request, base=None, base_sha256=None, base_sums=None)

    def copied(job: _Job) -> bool:
        return request.base is not None and job.length is not None and untouched(job)

    counts: list[AtLimit] = []
    with open_tensors(request.submodel, request.checkpoint, parameters) as tensors:
        merged = Merged(tensors, loras)
        finite, lately = FiniteWeights(merged, request.loras), Lately()

        def values(job: _Job, memory: NDArray[Any] | None = None) -> Any:
            if job.recipe is None:
                return job.values
            counts.append(count := AtLimit())
            found = _values(job.tensor, job.recipe, merged, count, lately, memory)
            finite.look_at(job.recipe, found, count)
            return found

        if size:
            _write_data(request, out, [(job, None if copied(job) else partial(values, job)) for job in jobs])
        for job in jobs:
            if job.length is None:
                job.tensor.CopyFrom(_inline(job.tensor, values(job)))
    write_graph(model, out)
    for path in sorted(request.structure.iterdir()):
        if path.name not in (MODEL_FILE, WEIGHTS_FILE, PARAMETERS_FILE):
            shutil.copyfile(path, out / path.name)
    facts = {**graph_facts(out / MODEL_FILE), "computed": len(counts), **finite.facts()}
    if "float16" in facts["dtypes"] and request.base is None:
        facts["at_limit"] = {
            "largest": sum(each.largest for each in counts),
            "smallest": sum(each.smallest for each in counts),
        }
    if request.loras:
        facts |= {"loras": loras.counts, "touched": len(loras.touched)}
    return facts


def _write_data(
    request: BindRequest, out: Path, jobs: Sequence[tuple[_Job, Callable[[NDArray[Any]], Any] | None]]
) -> None:
    """Write the data file: computed pieces, and pieces of the base where there is no function."""
    pieces: list[Piece] = []
    for job, compute in jobs:
        if job.length is None:
            continue
        if compute is None and pieces and pieces[-1].compute is None:
            pieces[-1] = Piece(pieces[-1].length + job.length, None)
        else:
            pieces.append(Piece(job.length, compute))
    base = request.base / WEIGHTS_FILE if request.base else None
    wanted = request.base_sums or request.base_sha256
    of_base: Literal["sums", "digest"] | None = "sums" if request.base_sums else "digest" if wanted else None
    digests = write_pieces(out / WEIGHTS_FILE, pieces, base, of_base=of_base, progress=request.progress)
    if wanted and wanted != (digests.base_sums if of_base == "sums" else digests.base):
        raise DamagedBase(
            "does not have the content that was published",
            where=str(base),
            remedy="Run again. If it happens again, check the disk and the memory.",
        )
    request.hashed(WEIGHTS_FILE, digests.written)
    request.summed(digests.sums, digests.base_sums if of_base == "digest" else None)


def _lay_out(model: Any, parameters: Mapping[str, tuple[int, ...]], structure: Path) -> list[_Job]:
    """Place every tensor like `onnx_model.files.store_proto`; return the tensors to fill, in file order."""
    from sdflow.onnx_model.files import raw_values

    jobs, size = [], 0
    for tensor, movable in initializers_and_constants(model):
        length = tensor_bytes(tensor)
        external = movable and length >= INLINE_BELOW
        recipe = read_recipe(tensor, parameters, str(structure / MODEL_FILE))
        if recipe is not None or external:
            own = raw_values(tensor, structure) if recipe is None else b""
            jobs.append(_Job(tensor, recipe, own, length if external else None))
        if external:
            set_external(tensor, WEIGHTS_FILE, size, length)
            size += length
    return jobs


def _require_space(out: Path, size: int) -> None:
    free = shutil.disk_usage(out).free
    if free < size + RESERVE:
        raise PassError(
            f"needs {spell_bytes(size)} and a reserve of {spell_bytes(RESERVE)}, but only {spell_bytes(free)} are free",
            where=str(out),
            remedy="Free some space, or move the cache to another disk.",
        )


def _require_same_layout(base: Path, size: int) -> None:
    found = (base / WEIGHTS_FILE).stat().st_size if (base / WEIGHTS_FILE).exists() else 0
    if found != size:
        raise PassError(
            f"is {found} bytes long, not {size}: it belongs to another structure", where=str(base / WEIGHTS_FILE)
        )


def _values(
    tensor: Any, recipe: Recipe, tensors: Merged, counts: AtLimit, lately: Lately, memory: NDArray[Any] | None
) -> NDArray[Any]:
    """Evaluate a recipe, in this memory if it is as large as the result."""
    import numpy as np

    from sdflow.weights.evaluate import evaluate
    from sdflow.weights.layout import contiguous

    unused = [] if memory is None else [memory]

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        if unused and unused[0].size == prod(shape) * dtype.itemsize:
            return unused.pop().view(dtype).reshape(shape)
        return np.empty(shape, dtype)

    try:
        values = evaluate(recipe, tensors.read, counts, tensors.tiles, lately, empty)
    except ValueError as error:
        raise PassError(f"the recipe of {tensor.name}: {error}", remedy=REMEDY) from error
    return contiguous(values)


def _inline(tensor: Any, values: NDArray[Any]) -> Any:
    import onnx

    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=values.tobytes())
