"""Run the artifact's graph on this machine's CPU: unchanged for the CPU target, lowered for any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.artifact import MODEL_FILE
from sdflow.errors import VerificationError
from sdflow.machine.onnx_runtime import import_onnxruntime, numpy_type, onnxruntime_errors
from sdflow.onnx_model.facts import precision_of
from sdflow.onnx_model.files import decode_errors
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.onnx_model.reading import load_graph
from sdflow.verify.artifact.element_types import element_types
from sdflow.verify.lowering import Lowered, PieceSession, lower, session_of
from sdflow.verify.lowering.pieces import ort_value

if TYPE_CHECKING:
    import onnxruntime

SCORES = "scores"


@dataclass
class RunnableGraph:
    """A submodel's graph in one session, or in a session per piece.

    scores: name of the extra output behind its flags; None without flags. held: objects that the session references.
    """

    session: onnxruntime.InferenceSession | PieceSession
    precision: str
    ran: str
    operators: Mapping[str, int]
    lowered: Mapping[str, int]
    scores: str | None
    held: Sequence[Any] = field(default=(), repr=False)


def open_graph(
    folder: Path,
    target: str,
    *,
    threads: int | None = None,
    most: int | None = None,
    edit: Callable[[Any], None] | None = None,
) -> RunnableGraph:
    """Load the model in `folder`. most: limit in bytes for weights in memory, as float32; None: all of them. edit:
    changes the ModelProto first.

    Raises VerificationError with the reason if it is not a model or cannot be run.
    """
    import onnx

    ort = import_onnxruntime()
    path = (folder / MODEL_FILE).resolve()
    model = read_graph(path)
    if edit is not None:
        edit(model)
    scores = scores_of(model.graph)
    exposed = [scores] if scores else []
    if target == "cpu":
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        for name in exposed:
            model.graph.output.append(
                onnx.helper.make_tensor_value_info(name, types.get(name, onnx.TensorProto.FLOAT), None)
            )
        lowered = Lowered(model, {}, {}, {} if most is None else _types(model))
    else:
        lowered = lower(model, expose=exposed)
    session: onnxruntime.InferenceSession | PieceSession
    try:
        if most is None:
            session = session_of(lowered, path.parent, threads=threads or 0, fuse=target == "cpu")
        else:
            session = PieceSession(lowered, path.parent, most, threads or 0, fuse=target == "cpu")
    except onnxruntime_errors(ort) as error:
        raise VerificationError(f"ONNX Runtime cannot load it: {error}", where=str(path)) from error
    return RunnableGraph(
        session=session,
        precision=quantized_graph(model) or precision_of(model.graph),
        ran="as it is" if target == "cpu" else "lowered",
        operators=dict(Counter(node.op_type for node in model.graph.node)),
        lowered=dict(lowered.operators),
        scores=scores,
    )


def _types(model: Any) -> dict[str, int]:
    """The element type of every value of an unlowered graph."""
    import onnx

    opsets = {entry.domain: entry.version for entry in model.opset_import}
    named = element_types(model.graph, opsets)
    return {name: onnx.TensorProto.DataType.Value(kind.upper()) for name, kind in named.items() if kind != "undefined"}


def read_graph(path: Path) -> Any:
    """Read the ModelProto of a file, without its weights. Raises VerificationError if it is not one."""
    import onnx

    path = path.resolve()
    try:
        return load_graph(path)
    except (OSError, ValueError, TypeError, onnx.onnx_cpp2py_export.checker.ValidationError) as error:
        raise VerificationError(f"the graph cannot be read: {error}", where=str(path)) from error
    except decode_errors() as error:
        raise VerificationError(f"this is not an ONNX graph: {error}", where=str(path)) from error


def scores_of(graph: Any) -> str | None:
    """The value that the graph compares with 0 to compute its flags (the scores of concepts); None without flags.

    Flags alone say little about the numbers behind them.
    """
    import onnx

    producers = {name: node for node in graph.node for name in node.output}
    waiting = [str(value.name) for value in graph.output if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL]
    while waiting:
        node = producers.get(waiting.pop(0))
        before = producers.get(node.input[0]) if node is not None and node.op_type == "Greater" else None
        if before is not None and not before.op_type.startswith(
            "Reduce"
        ):  # `any` is exported as a sum greater than 0, too
            return str(before.output[0])
        waiting += node.input if node is not None else []
    return None


def takes(session: onnxruntime.InferenceSession | PieceSession, inputs: Mapping[str, Any]) -> bool:
    """Whether inputs of these shapes match the graph's fixed sizes. Unknown inputs are ignored."""

    def same(fixed: Sequence[Any], shape: Sequence[int]) -> bool:
        return all(size == given for size, given in zip(fixed, shape, strict=False) if isinstance(size, int))

    known = [value for value in session.get_inputs() if value.name in inputs]
    return all(same(value.shape, inputs[value.name].shape) for value in known)


def run_graph(graph: RunnableGraph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The graph's outputs by name, with inputs cast to the declared types; the exposed scores as SCORES."""
    return next(run_each(graph, [inputs]))


def run_each(graph: RunnableGraph, cases: Sequence[Mapping[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Run `run_graph` for each case. A graph in pieces runs all cases before it yields the first."""
    names = [value.name for value in graph.session.get_outputs()]
    session = graph.session
    given = (_cast(graph, inputs) for inputs in cases)
    found: Iterable[Sequence[np.ndarray]]
    found = session.run_each([*given]) if isinstance(session, PieceSession) else (_run(session, one) for one in given)
    for values in found:
        yield {SCORES if name == graph.scores else name: value for name, value in zip(names, values, strict=True)}


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Sequence[Any]:
    """All outputs. ONNX Runtime does not take bfloat16 from numpy, so such inputs are passed as OrtValues."""
    if all(value.dtype != "bfloat16" for value in feeds.values()):
        return session.run(None, feeds)  # type: ignore[no-any-return]
    names = [value.name for value in session.get_outputs()]
    given = {name: ort_value(value) for name, value in feeds.items()}
    return [value.numpy() for value in session.run_with_ort_values(names, given)]


def _cast(graph: RunnableGraph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    types = {value.name: numpy_type(value) for value in graph.session.get_inputs()}
    if unknown := sorted(types.keys() - inputs.keys()):
        raise VerificationError(
            f"the graph has an input {unknown[0]}, but diffusers feeds {', '.join(inputs)}",
            remedy="Keep the names of OnnxConversion: no pass may rename inputs or outputs.",
        )
    return {name: inputs[name].astype(kind, copy=False) for name, kind in types.items()}


def values_in_pieces(graph: RunnableGraph, inputs: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Every value that passes between pieces of a graph or is exposed, piece by piece, except bfloat16, which numpy
    lacks."""
    assert isinstance(graph.session, PieceSession)
    for (found,) in graph.session.through([_cast(graph, inputs)]):
        for value in found.values():
            if value.data_type() != "tensor(bfloat16)":
                yield value.numpy()
