"""Bind: a structure and a checkpoint become a model. The recipes are carried out and streamed to the data file.

The result is, byte for byte, what the chain's passes write when they carry the weights. Memory is bounded by the
largest tensors. A model of the same structure with other LoRAs can be made from one that is there: its data file is
copied, and only what a LoRA touches in either is computed again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE, Facts
from sdflow.errors import PassError
from sdflow.passes.base import LoraInput
from sdflow.passes.graph_facts import graph_facts, tensor_bytes
from sdflow.passes.onnx_files import INLINE_BELOW, initializers_and_constants, set_external, write_graph
from sdflow.weights.structure import PARAMETERS_FILE, REMEDY, read_parameters, read_recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdflow.weights.half import AtLimit
    from sdflow.weights.lora import Merged
    from sdflow.weights.recipe import Recipe

THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class BindRequest:
    """What `bind` needs.

    structure: a directory that passes wrote `without_weights()`. checkpoint: as `open_checkpoint` gives it (`load`).
    loras: in the order of the workflow. base: a model bound from the same structure and checkpoint, with `base_loras`.
    progress: called now and then with the bytes written so far and the bytes in all.
    """

    submodel: str
    structure: Path
    checkpoint: Mapping[str, Any]
    loras: Sequence[LoraInput] = ()
    base: Path | None = None
    base_loras: Sequence[LoraInput] = ()
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)


@dataclass(frozen=True)
class _Job:
    """One initializer to write: into the data file at `offset`, or, if that is None, into its TensorProto."""

    tensor: Any
    recipe: Recipe
    offset: int | None


def bind(request: BindRequest, out: Path) -> Facts:
    """Write model.onnx, model.onnx.data and the structure's other files into the empty directory `out`.

    Returns the facts of the graph, `computed`, the weights that were not copied from the base, `at_limit` (as
    OnnxFloatToFloat16 counts, if there is float16 and no base), and with LoRAs `loras`, the weights that each touched,
    and `touched`.
    Raises CheckpointError when the checkpoint or a LoRA does not fit the architecture, PassError for a structure that
    is damaged or a disk without room for the result.
    """
    import onnx

    from sdflow.weights.half import AtLimit
    from sdflow.weights.lora import Merged, read_loras
    from sdflow.weights.recipe import params
    from sdflow.weights.tensors import open_tensors

    parameters = read_parameters(request.structure)
    model = onnx.load(str(request.structure / MODEL_FILE), load_external_data=False)
    jobs, constants, size = _lay_out(model, parameters, request.structure)
    _require_space(out, size)
    loras = read_loras(request.submodel, request.loras, parameters)
    touched = loras.touched | read_loras(request.submodel, request.base_loras, parameters).touched
    counts = AtLimit()
    with open_tensors(request.submodel, request.checkpoint, parameters) as tensors:
        data = out / WEIGHTS_FILE
        if request.base is not None:
            _require_same_layout(request.base, size)
            shutil.copyfile(request.base / WEIGHTS_FILE, data)
            changed = [job for job in jobs if job.offset is None or touched & {p.key for p in params(job.recipe)}]
        else:
            with data.open("wb") as stream:
                stream.truncate(size)
            changed = jobs
            _write_constants(data, constants)
        _carry_out(changed, Merged(tensors, loras), data, counts, request.progress, size)
    if size == 0:
        data.unlink()
    write_graph(model, out)
    for path in sorted(request.structure.iterdir()):
        if path.name not in (MODEL_FILE, WEIGHTS_FILE, PARAMETERS_FILE):
            shutil.copyfile(path, out / path.name)
    facts = {**graph_facts(out / MODEL_FILE), "computed": len(changed)}
    if "float16" in facts["dtypes"] and request.base is None:
        facts["at_limit"] = {"largest": counts.largest, "smallest": counts.smallest}
    if request.loras:
        facts |= {"loras": loras.counts, "touched": len(loras.touched)}
    return facts


def _lay_out(
    model: Any, parameters: Mapping[str, tuple[int, ...]], structure: Path
) -> tuple[list[_Job], list[tuple[int, bytes]], int]:
    """Give every tensor its place, as `onnx_files.store_proto` would: the jobs, (offset, bytes) of the large values
    that are the graph's own, and the size of the data file."""
    from sdflow.passes.onnx_files import raw_values

    jobs, constants, size = [], [], 0
    for tensor, movable in initializers_and_constants(model):
        length = tensor_bytes(tensor)
        external = movable and length >= INLINE_BELOW
        recipe = read_recipe(tensor, parameters, str(structure / MODEL_FILE))
        if recipe is not None:
            jobs.append(_Job(tensor, recipe, size if external else None))
        elif external:
            constants.append((size, raw_values(tensor, structure)))
        if external:
            set_external(tensor, WEIGHTS_FILE, size, length)
            size += length
    return jobs, constants, size


def _require_space(out: Path, size: int) -> None:
    free = shutil.disk_usage(out).free
    if free < size + (64 << 20):
        raise PassError(
            f"{size / 1e9:.2f} GB are to be written and {free / 1e9:.2f} GB are free",
            where=str(out),
            remedy="Free some space, or put the cache on another disk.",
        )


def _require_same_layout(base: Path, size: int) -> None:
    found = (base / WEIGHTS_FILE).stat().st_size if (base / WEIGHTS_FILE).exists() else 0
    if found != size:
        raise PassError(
            f"is {found} bytes long, not {size}: it is of another structure", where=str(base / WEIGHTS_FILE)
        )


def _write_constants(data: Path, constants: Iterable[tuple[int, bytes]]) -> None:
    with data.open("r+b") as stream:
        for offset, values in constants:
            stream.seek(offset)
            stream.write(values)


def _carry_out(
    jobs: Sequence[_Job],
    tensors: Merged,
    data: Path,
    counts: AtLimit,
    progress: Callable[[int, int], None],
    size: int,
) -> None:
    """Evaluate every job's recipe, some at a time, in the order of the file."""
    from sdflow.weights.half import AtLimit

    total = sum(tensor_bytes(job.tensor) for job in jobs)
    done = 0

    def carry_out(job: _Job) -> AtLimit:
        mine = AtLimit()
        values = _values(job, tensors, mine)
        if job.offset is None:
            job.tensor.CopyFrom(_inline(job.tensor, values))
        else:
            with data.open("r+b", buffering=0) as stream:
                stream.seek(job.offset)
                _write_all(stream, values)
        return mine

    with ThreadPoolExecutor(THREADS) as pool:
        futures = {pool.submit(carry_out, job): job for job in jobs}
        try:
            waiting = set(futures)
            while waiting:
                finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                for future in finished:
                    mine = future.result()
                    counts.largest += mine.largest
                    counts.smallest += mine.smallest
                    done += tensor_bytes(futures[future].tensor)
                progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)


def _values(job: _Job, tensors: Merged, counts: AtLimit) -> NDArray[Any]:
    import numpy as np

    from sdflow.weights.recipe import evaluate

    try:
        values = evaluate(job.recipe, tensors.read, counts)
    except ValueError as error:
        raise PassError(f"the recipe of {job.tensor.name}: {error}", remedy=REMEDY) from error
    return np.ascontiguousarray(values)


def _inline(tensor: Any, values: NDArray[Any]) -> Any:
    import onnx

    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=values.tobytes())


def _write_all(stream: Any, values: NDArray[Any]) -> None:
    left = memoryview(values.data).cast("B") if values.size else memoryview(b"")
    while left:
        left = left[stream.write(left) :]
