"""ONNX Runtime sessions of lowered graphs, with the artifact's own weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sdflow.verify.lowering.lower import Lowered

if TYPE_CHECKING:
    import onnx
    import onnxruntime

LARGE = 4 * 10**9
"""Up to this many bytes of weights, as float32, they are converted once and packed for their operators, which takes up
to four times the memory of float16 weights. Larger ones stay as stored and are converted where they are read."""

FEW = 3
"""Up to this many runs of a few dozen rows, packing the weights first takes longer than it saves."""


def session_of(
    lowered: Lowered,
    folder: Path,
    *,
    threads: int = 0,
    fuse: bool = False,
    given: Mapping[str, onnxruntime.OrtValue] = MappingProxyType({}),
    brief: bool = False,
    plain: bool = False,
) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. folder: of the artifact's external data. threads: 0 for one per core.

    fuse: with all of ONNX Runtime's optimizations, as CPU artifacts run. given: values of the initializers lowered as
    `exact`; the caller keeps them alive with the session. brief: the session runs at most FEW times. plain: the graph is not
    optimized, which copies and hashes given weights.

    The weights are read from the artifact's file and converted once, when the session is made; not those of LARGE graphs
    or brief sessions.
    """
    import onnxruntime

    large = brief or float32_bytes(lowered.model.graph.initializer) > LARGE
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Planning memory reuse costs a minute for the 5,300 nodes of a lowered UNet: 7 s without.
    options.enable_mem_reuse = False
    if (large or plain) and not fuse:
        # Even the basic level (of ONNX Runtime 1.31) makes a run keep every converted weight until its end.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    elif not fuse:
        # Folding constants is enough: fusions take 8 s more for a UNet without speeding up runs.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # Keep the graph's order: the default one defers nodes that only outputs need, and keeps their inputs until then.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if large:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_mem_pattern = options.enable_cpu_mem_arena = False  # both keep the memory of every value
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    if given:
        options.add_external_initializers(list(given), list(given.values()))
    return onnxruntime.InferenceSession(lowered.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def float32_bytes(tensors: Iterable[onnx.TensorProto]) -> int:
    """Bytes of initializers as float32."""
    return sum(4 * prod(tensor.dims) for tensor in tensors)
