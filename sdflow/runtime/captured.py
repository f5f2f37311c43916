"""A run of a session as a CUDA graph of our own: the one that ONNX Runtime captures cannot be changed.

Memsets in it become kernels (`kernels/memset_nodes.c`).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from sdflow.errors import SlowerWarning
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.runtime.kernels.library import kernel_library
from sdflow.runtime.place import Place

if TYPE_CHECKING:
    import torch


def captured(run: Callable[[], None], place: Place) -> torch.cuda.CUDAGraph | None:
    """What a run queues on the place's stream, to be replayed. None, with a warning, where it cannot be had.

    run: made before, so that it takes no memory of the device now; it must not wait for the device.
    """
    import torch

    library = kernel_library()
    if library is None:  # it has said why
        return None
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with place.current():
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on loading
            try:
                run()
            finally:
                graph.capture_end()
        why = _memsets_as_kernels(library, graph.raw_cuda_graph())
        if why is None:
            graph.instantiate()
            return graph
    except onnxruntime_errors(import_onnxruntime()) as error:  # torch's are RuntimeErrors too
        why = str(error)
    warnings.warn(
        f"ONNX Runtime captures a CUDA graph, which is slower than sdflow's: {why}", SlowerWarning, stacklevel=4
    )
    return None


def _memsets_as_kernels(library: object, graph: int) -> str | None:
    """Why not."""
    change = ctypes.CDLL(str(library)).sdflow_memsets_as_kernels
    change.restype = ctypes.c_char_p
    counts = (ctypes.c_size_t * 2)()
    why = change(ctypes.c_void_p(graph), counts)
    if why is not None:
        return str(why.decode())
    return f"{counts[1]} nodes of it are more than kernels, copies and memsets" if counts[1] else None
