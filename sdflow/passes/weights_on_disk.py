"""Keep large weights on disk while ONNX Runtime's graph tools run.

`onnxruntime.transformers` copies the whole model for every shape inference, and protobuf never frees replaced values:
for the full SD1.5 UNet this adds up to more than 17 GB. Weights pass through four places only: loading,
`numpy_helper.to_array` (reads), `Fusion.add_initializer` (writes packed and transposed ones) and
`convert_tensor_float_to_float16`. Patched here, these read memory-mapped files and append to one, and the graph holds
references. The result is byte-identical; a test checks that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdflow.onnx_model.facts import dtype_name, subgraphs, tensor_bytes
from sdflow.onnx_model.files import INLINE_BELOW, data_span, inline_values, is_external, set_external
from sdflow.processes.patched import patched

MOVABLE = ("float32", "float16", "bfloat16")
"""Types of weights that may stay on disk; all others are small in diffusion models and are loaded at once."""


def load_with_references(model_path: Path) -> Any:
    """Load a ModelProto whose large weights refer to their data file by absolute path."""
    import onnx

    model = onnx.load(str(model_path), load_external_data=False)
    for graph in subgraphs(model.graph):
        for tensor in graph.initializer:
            if not is_external(tensor):
                continue
            length = tensor_bytes(tensor)
            if dtype_name(tensor.data_type) in MOVABLE:
                location, offset, _ = data_span(tensor)
                set_external(tensor, str(model_path.parent / location), offset, length)
            else:
                inline_values(tensor, model_path.parent, length)
    return model


@contextlib.contextmanager
def weights_on_disk(scratch: Path) -> Iterator[None]:
    """While active, onnxruntime.transformers and Olive load models with references and write new weights into
    `scratch`.

    Not for `opt_level` above 0, where ONNX Runtime itself reads and writes the model.
    """
    import onnx
    from olive.model import ONNXModelHandler
    from onnxruntime.transformers import optimizer

    from sdflow.weights import half

    fusion_base, float16 = __import__("fusion_base"), __import__("float16")
    files = _Files(scratch / "new_weights")
    add_initializer = fusion_base.Fusion.add_initializer
    to_array = onnx.numpy_helper.to_array
    to_float16 = float16.convert_tensor_float_to_float16

    def add_on_disk(self: Any, name: str, data_type: int, dims: Any, vals: Any, raw: bool = True) -> Any:
        size = getattr(vals, "nbytes", 0)
        if not raw or size < INLINE_BELOW or dtype_name(data_type) not in MOVABLE:
            return add_initializer(self, name, data_type, dims, vals, raw)
        tensor = onnx.TensorProto(name=name, data_type=data_type, dims=[int(size) for size in dims])
        files.append(tensor, vals)
        self.model.add_initializer(tensor, self.this_graph_name)
        return tensor

    def read(tensor: Any, base_dir: str = "") -> Any:
        return files.view(tensor) if _is_reference(tensor) else to_array(tensor, base_dir)

    def convert(tensor: Any, min_positive_val: float = 5.96e-08, max_finite_val: float = 65504.0) -> Any:
        if not (_is_reference(tensor) and tensor.data_type == onnx.TensorProto.FLOAT):
            return to_float16(tensor, min_positive_val, max_finite_val)
        values = half.to_float16(files.view(tensor), min_positive_val, max_finite_val)
        tensor.data_type = onnx.TensorProto.FLOAT16
        files.append(tensor, values)
        return tensor

    def load_handler(self: Any, rank: int | None = None, cache_model: bool = True) -> Any:
        return load_with_references(Path(self.model_path))

    with (
        patched(fusion_base.Fusion, add_initializer=add_on_disk),
        patched(onnx.numpy_helper, to_array=read),
        patched(float16, convert_tensor_float_to_float16=convert),
        patched(optimizer, load_model=lambda path, **_: load_with_references(Path(path))),
        patched(ONNXModelHandler, load_model=load_handler),
    ):
        yield


class _Files:
    """Memory maps of data files, and the file that new weights are appended to."""

    def __init__(self, new: Path) -> None:
        self._new = new
        self._end = 0

    def view(self, tensor: Any) -> Any:
        """Map a reference's values; they are read on access."""
        import numpy as np
        import onnx

        location, offset, _ = data_span(tensor)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(location, dtype=dtype, mode="r", offset=offset, shape=tuple(tensor.dims))

    def append(self, tensor: Any, values: Any) -> None:
        """Append `values` to the file of new weights and make `tensor` a reference to them."""
        import numpy as np

        with self._new.open("ab") as stream:
            stream.write(np.ascontiguousarray(values).data)
        set_external(tensor, str(self._new), self._end, values.nbytes)
        self._end += values.nbytes


def _is_reference(tensor: Any) -> bool:
    return is_external(tensor) and Path(data_span(tensor)[0]).is_absolute()
