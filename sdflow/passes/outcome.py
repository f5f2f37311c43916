"""Checks on the output of a pass: a readable ONNX model and JSON-serializable facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.digest import canonical_json
from sdflow.disk.input_file import is_regular
from sdflow.errors import PassError, VerificationError
from sdflow.onnx_model.reading import load_graph

REMEDY = "This is a bug in the pass; see sdflow.passes.base for what it must return and write."


def require_facts(facts: Any, name: str) -> Facts:
    """Raise PassError unless a pass returned a mapping that JSON can hold."""
    try:
        if not isinstance(facts, Mapping) or not all(isinstance(key, str) for key in facts):
            raise TypeError(f"{facts!r:.60} is not a map of facts")
        canonical_json(facts)
    except (TypeError, ValueError, RecursionError) as error:
        raise PassError(f"returned invalid facts: {error}", where=name, remedy=REMEDY) from error
    return facts


def require_model(out: Path, name: str) -> None:
    """Raise PassError unless `out` holds a valid model with complete data and no symbolic links."""
    from sdflow.onnx_model.files import decode_errors

    if links := [path.name for path in out.rglob("*") if path.is_symlink()]:
        raise PassError(f"wrote {links[0]} as a symbolic link", where=name, remedy=REMEDY)
    if not is_regular(out / MODEL_FILE):
        raise PassError(f"wrote no {MODEL_FILE}", where=name, remedy=REMEDY)
    try:
        model = load_graph(out / MODEL_FILE)
    except decode_errors() as error:
        raise PassError(f"wrote a {MODEL_FILE} that is not an ONNX model", where=name, remedy=REMEDY) from error
    except VerificationError as error:
        raise PassError(f"wrote {error.what}", where=name, remedy=error.remedy) from error
    if wrong := next(_wrong(model, out), None):
        raise PassError(f"wrote a {MODEL_FILE} that is not valid: {wrong}", where=name, remedy=REMEDY)


def _wrong(model: Any, out: Path) -> Iterator[str]:
    from sdflow.onnx_model.files import data_span, initializers_and_constants, is_external, missing_data
    from sdflow.onnx_model.stub import is_stub

    graph = model.graph
    if not graph.node or not graph.output:
        yield "it has no graph"
    if not model.opset_import:
        yield "it has no operator set"
    tensors = [tensor for tensor, _ in initializers_and_constants(model)]
    for tensor in tensors:
        if is_external(tensor) and not is_stub(tensor) and Path(data_span(tensor)[0]).name != data_span(tensor)[0]:
            yield f"the data of {tensor.name} are outside the folder"
    if not any(is_stub(tensor) for tensor in tensors) and (lacking := missing_data(model, out)):
        yield lacking
    known = {"", *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    known |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        for value in node.input:
            if value not in known:
                yield f"{node.op_type} {node.name} reads {value}, which no earlier node produces"
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            yield f"no node produces its output {value.name}"
