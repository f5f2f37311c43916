"""The artifact's graph on this machine's CPU: as it is for the CPU target, lowered for any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE
from sdflow.errors import VerificationError
from sdflow.machine.onnx_runtime import import_onnxruntime, numpy_type, onnxruntime_errors
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.onnx_model.reading import load_graph
from sdflow.verify.lowering import Lowered, lower, session_of

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime

SCORES = "scores"


@dataclass
class RunnableGraph:
    """A submodel's graph in a session. scores: the value behind its flags, a further output; None without flags."""

    session: onnxruntime.InferenceSession
    precision: str
    ran: str
    operators: Mapping[str, int]
    lowered: Mapping[str, int]
    scores: str | None


def open_graph(folder: Path, target: str, *, threads: int | None = None) -> RunnableGraph:
    """Load the model in `folder`. Raises VerificationError when it is no model or cannot be run, saying why."""
    import onnx

    ort = import_onnxruntime()
    path = (folder / MODEL_FILE).resolve()
    model = read_graph(path)
    scores = scores_of(model.graph)
    exposed = [scores] if scores else []
    if target == "cpu":
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        for name in exposed:
            model.graph.output.append(
                onnx.helper.make_tensor_value_info(name, types.get(name, onnx.TensorProto.FLOAT), None)
            )
        lowered = Lowered(model, {}, {}, {})
    else:
        lowered = lower(model, expose=exposed)
    try:
        session = session_of(lowered, path.parent, threads=threads or 0, fuse=target == "cpu")
    except onnxruntime_errors(ort) as error:
        raise VerificationError(f"ONNX Runtime cannot load it: {error}", where=str(path)) from error
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)
    return RunnableGraph(
        session=session,
        precision=quantized_graph(model) or ("float16" if half else "float32"),
        ran="as it is" if target == "cpu" else "lowered",
        operators=dict(Counter(node.op_type for node in model.graph.node)),
        lowered=dict(lowered.operators),
        scores=scores,
    )


def read_graph(path: Path) -> Any:
    """The ModelProto of a file, without its weights. Raises VerificationError when it is none."""
    import onnx

    from sdflow.onnx_model.files import decode_errors

    path = path.resolve()
    try:
        return load_graph(path)
    except (OSError, ValueError, TypeError, onnx.onnx_cpp2py_export.checker.ValidationError) as error:
        raise VerificationError(f"the graph cannot be read: {error}", where=str(path)) from error
    except decode_errors() as error:
        raise VerificationError(f"this is no ONNX graph: {error}", where=str(path)) from error


def scores_of(graph: Any) -> str | None:
    """What is compared with 0 to give the flags that a graph puts out: the scores of concepts; None without flags.

    The flags alone say little of the numbers behind them.
    """
    import onnx

    producers = {name: node for node in graph.node for name in node.output}
    waiting = [str(value.name) for value in graph.output if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL]
    while waiting:
        node = producers.get(waiting.pop(0))
        before = producers.get(node.input[0]) if node is not None and node.op_type == "Greater" else None
        if before is not None and not before.op_type.startswith("Reduce"):  # `any` is a sum greater than 0 as well
            return str(before.output[0])
        waiting += node.input if node is not None else []
    return None


def takes(session: onnxruntime.InferenceSession, inputs: Mapping[str, Any]) -> bool:
    """Whether inputs of these shapes may be fed: sizes that the graph fixes are the same. Unknown inputs do not count."""

    def same(fixed: Sequence[Any], shape: Sequence[int]) -> bool:
        return all(size == given for size, given in zip(fixed, shape, strict=False) if isinstance(size, int))

    known = [value for value in session.get_inputs() if value.name in inputs]
    return all(same(value.shape, inputs[value.name].shape) for value in known)


def run_graph(graph: RunnableGraph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The graph's outputs by name, inputs cast to the types that it declares; the exposed scores as SCORES."""
    names = [value.name for value in graph.session.get_outputs()]
    types = {value.name: numpy_type(value) for value in graph.session.get_inputs()}
    if unknown := sorted(types.keys() - inputs.keys()):
        raise VerificationError(
            f"the graph has an input {unknown[0]}, where diffusers feeds {', '.join(inputs)}",
            remedy="Keep the names of OnnxConversion: no pass may rename inputs or outputs.",
        )
    values = graph.session.run(None, {name: inputs[name].astype(kind, copy=False) for name, kind in types.items()})
    return {SCORES if name == graph.scores else name: value for name, value in zip(names, values, strict=True)}
