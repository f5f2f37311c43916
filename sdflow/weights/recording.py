"""While `recording()` is active, weights are stubs, and the passes' operations on them are recorded.

Weights pass through a few functions on their way from a module to an optimized graph. Each is replaced by one that
handles stubs and is otherwise unchanged:

- `torch.onnx.export` gives parameters stubs instead of values,
- onnx loads no data for a stub; `to_array` returns a symbol, `from_array` takes one,
- onnx_ir keeps a stub's TensorProto,
- `Fusion.add_initializer` of onnxruntime.transformers takes a symbol,
- `convert_tensor_float_to_float16` of onnxruntime.transformers adds the rounding to the recipe,
- its symbolic shape inference, which reads sizes from constants, gets no value for a stub: no weight is a size.

Any other function fails on a stub, which has no file.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sdflow.errors import WeightValueRead
from sdflow.onnx_model.nodes import refill
from sdflow.onnx_model.stub import is_stub
from sdflow.processes.patched import patched
from sdflow.weights.recipe import Float16, Param
from sdflow.weights.stubs import make_stub, stub_recipe, while_recording
from sdflow.weights.symbol import Symbol

# Passes of torch's exporter, with arguments (graph or node, values of the parameters, opset).
_SHAPE_INFERENCE = ("_jit_pass_onnx_graph_shape_type_inference", "_jit_pass_onnx_node_shape_type_inference")
# onnxruntime.transformers adds its own folder to sys.path, so its modules exist twice.
_PREFIXES = ("", "onnxruntime.transformers.")


@contextmanager
def recording() -> Iterator[None]:
    """Patch the functions above in this process while active.

    Raises WeightValueRead at the end if anything read a value, even if that error was swallowed.
    """
    reads: list[WeightValueRead] = []
    with ExitStack() as stack:
        stack.enter_context(while_recording())
        for owner, name, replacement in _replacements(reads):
            stack.enter_context(patched(owner, **{name: replacement(getattr(owner, name))}))
        try:
            yield
        except Exception as error:  # a library may wrap WeightValueRead in its own error
            if reads and error is not reads[0]:
                raise reads[0] from error
            raise
    if reads:
        raise reads[0]


def _replacements(reads: list[WeightValueRead]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute, function from the original to its replacement)."""
    import onnx
    import onnx_ir
    import torch

    importlib.import_module("onnxruntime.transformers.optimizer")  # adds its folder to sys.path
    yield onnx.numpy_helper, "to_array", lambda original: _to_array(original, reads)
    yield onnx.numpy_helper, "from_array", _from_array
    yield onnx.external_data_helper, "load_external_data_for_tensor", _load_external_data
    yield onnx_ir.serde, "deserialize_tensor", _deserialize_tensor
    yield torch.onnx, "export", _export
    for prefix in ("", "onnxruntime.tools."):  # this also exists twice
        shapes = importlib.import_module(f"{prefix}symbolic_shape_infer").SymbolicShapeInference
        yield shapes, "_try_get_value", _without_symbols
    for prefix in _PREFIXES:
        fusion = importlib.import_module(f"{prefix}fusion_base").Fusion
        yield fusion, "add_initializer", _add_initializer
        yield importlib.import_module(f"{prefix}float16"), "convert_tensor_float_to_float16", _convert_tensor


def _to_array(original: Any, reads: list[WeightValueRead]) -> Any:
    def to_array(tensor: Any, *args: Any, **options: Any) -> Any:
        return Symbol(stub_recipe(tensor), reads) if is_stub(tensor) else original(tensor, *args, **options)

    return to_array


def _from_array(original: Any) -> Any:
    import onnx

    def from_array(array: Any, name: str | None = None) -> Any:
        if not isinstance(array, Symbol):
            return original(array, name)
        tensor = onnx.TensorProto(name=name)
        make_stub(tensor, array.recipe)
        return tensor

    return from_array


def _load_external_data(original: Any) -> Any:
    def load_external_data_for_tensor(tensor: Any, base_dir: str) -> None:
        if not is_stub(tensor):
            original(tensor, base_dir)

    return load_external_data_for_tensor


def _deserialize_tensor(original: Any) -> Any:
    import onnx_ir

    class StubTensor(onnx_ir.serde.TensorProtoTensor):  # type: ignore[misc]
        """Serialized as its original TensorProto. Reports 0 bytes so that nothing moves it to a data file."""

        nbytes = 0

    def deserialize_tensor(proto: Any, *args: Any, **options: Any) -> Any:
        return StubTensor(proto) if is_stub(proto) else original(proto, *args, **options)

    return deserialize_tensor


def _add_initializer(original: Any) -> Any:
    import onnx

    def add_initializer(self: Any, name: str, data_type: int, dims: Any, vals: Any, raw: bool = True) -> Any:
        if not isinstance(vals, Symbol):
            return original(self, name, data_type, dims, vals, raw)
        wanted = onnx.helper.tensor_dtype_to_np_dtype(data_type)
        if not raw or wanted != vals.dtype:
            vals.refuse(f"storing it as {wanted.name}")
        tensor = onnx.TensorProto(name=name)
        make_stub(tensor, vals.reshape([int(size) for size in dims]).recipe)
        self.model.add_initializer(tensor, self.this_graph_name)
        return tensor

    return add_initializer


def _without_symbols(original: Any) -> Any:
    def _try_get_value(self: Any, node: Any, index: int) -> Any:
        found = original(self, node, index)
        return None if type(found) is Symbol else found

    return _try_get_value


def _convert_tensor(original: Any) -> Any:
    import onnx

    def convert_tensor_float_to_float16(
        tensor: Any, min_positive_val: float = 5.96e-08, max_finite_val: float = 65504.0
    ) -> Any:
        if not isinstance(tensor, onnx.TensorProto) or not is_stub(tensor):
            return original(tensor, min_positive_val, max_finite_val)
        if tensor.data_type == onnx.TensorProto.FLOAT:
            make_stub(tensor, Float16(min_positive_val, max_finite_val, stub_recipe(tensor)))
        return tensor

    return convert_tensor_float_to_float16


def _without_values(infer: Any, parameters: Container[str]) -> Any:
    """Wrap the exporter's shape inference to withhold parameter values: it would serialize each for every node that
    reads it, but only needs types."""
    last: list[dict[str, Any]] = [{}, {}]

    def infer_shapes(graph: Any, values: dict[str, Any], opset: int) -> Any:
        if values is not last[0]:
            last[:] = values, {name: value for name, value in values.items() if name not in parameters}
        return infer(graph, last[1], opset)

    return infer_shapes


def _export(original: Any) -> Any:
    """Wrap `torch.onnx.export(model, ...)` to create a stub for every entry of the model's state_dict.

    To avoid serializing the values, they are withheld from the exporter's last step, which then makes the parameters
    graph inputs; these become stubs, in the exporter's order of initializers, which is that of its inputs.
    """
    import onnx
    import torch

    def export(model: Any, *args: Any, **options: Any) -> Any:
        parameters = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        graph_class: Any = torch._C.Graph
        write = graph_class._export_onnx

        def write_hollow(graph: Any, values: dict[str, Any], *rest: Any) -> Any:
            constants = {name: value for name, value in values.items() if name not in parameters}
            proto, *others = write(graph, constants, *rest)
            written = onnx.load_from_string(proto)
            real = {tensor.name: tensor for tensor in written.graph.initializer}
            inputs = [item for item in written.graph.input if item.name not in parameters]
            for item in written.graph.input:
                if item.name in parameters:
                    real[item.name] = onnx.TensorProto(name=item.name)
                    make_stub(real[item.name], Param(item.name, parameters[item.name]))
            order = {value.debugName(): index for index, value in enumerate(graph.inputs())}
            refill(written.graph.initializer, sorted(real.values(), key=lambda tensor: order[tensor.name]))
            refill(written.graph.input, inputs)
            return written.SerializeToString(), *others

        infer = {name: _without_values(getattr(torch._C, name), parameters) for name in _SHAPE_INFERENCE}
        with patched(graph_class, _export_onnx=write_hollow), patched(torch._C, **infer):
            return original(model, *args, **options)

    return export
