"""ONNX Runtime sessions of lowered graphs, over the artifact's own weights."""

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
"""Bytes of weights, as float32, up to which they are converted once and packed for their operators: that takes up to four
times the memory of float16 weights. Beyond, they stay as the artifact has them, and are converted where they are read."""

FEW = 3
"""Runs of a few dozen rows that take as long as converting and packing the weights for them beforehand saves."""


def session_of(
    lowered: Lowered,
    folder: Path,
    *,
    threads: int = 0,
    fuse: bool = False,
    given: Mapping[str, onnxruntime.OrtValue] = MappingProxyType({}),
    brief: bool = False,
) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. folder: where the artifact's external data lies. threads: 0 for one per core.

    fuse: with all of ONNX Runtime's optimizations, as a CPU artifact is run. given: the values of the initializers that
    were lowered as `exact`; whoever has the session keeps them as long. brief: the session runs at most FEW times.

    The weights are read from the artifact's file and converted once, when the session is made; not those of LARGE graphs
    or brief sessions.
    """
    import onnxruntime

    large = brief or float32_bytes(lowered.model.graph.initializer) > LARGE
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Planning which value takes whose place costs a minute for the 5,300 nodes of a lowered UNet: 7 s without.
    options.enable_mem_reuse = False
    if large and not fuse:
        # Even the basic level (of ONNX Runtime 1.31) makes a run keep every weight that it converted until its end.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    elif not fuse:
        # Folding constants is enough: the fusions take 8 s more for a UNet, and a run takes as long with them.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # In the order of the graph: the default order puts off what only outputs need, and keeps values for it until then.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if large:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_mem_pattern = options.enable_cpu_mem_arena = False  # both keep what every value once took
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    if given:
        options.add_external_initializers(list(given), list(given.values()))
    return onnxruntime.InferenceSession(lowered.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def float32_bytes(tensors: Iterable[onnx.TensorProto]) -> int:
    """What initializers take as float32."""
    return sum(4 * prod(tensor.dims) for tensor in tensors)
