"""Imports ONNX Runtime without telemetry, and maps its errors and type names."""

from __future__ import annotations

import os
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.targets import Target


def import_onnxruntime(target: Target | None = None) -> Any:
    """Import ONNX Runtime with telemetry disabled. Raises TargetUnavailableError if it cannot be imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read at import; without it, ORT writes a device ID under HOME
    try:
        import onnxruntime
    except ImportError as error:
        raise TargetUnavailableError(
            f"ONNX Runtime cannot be imported: {error}",
            where=target.name if target else None,
            remedy=f"pip install {target.package if target else 'onnxruntime'}",
        ) from error
    onnxruntime.disable_telemetry_events()
    # Silences cuDNN's warnings about each engine it tries and cannot use. Real errors raise.
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def onnxruntime_errors(ort: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of creating or running a session; ONNX Runtime's own have no common base."""
    state = ort.capi.onnxruntime_pybind11_state
    names = ("Fail", "EPFail", "NotImplemented", "InvalidGraph", "InvalidProtobuf", "InvalidArgument", "NoSuchFile")
    # UnicodeDecodeError: its messages may contain non-text bytes of the model.
    return (RuntimeError, UnicodeDecodeError, state.RuntimeException, *(getattr(state, name) for name in names))


def numpy_type(value: Any) -> str:
    """Return the numpy type name of a session's input or output (`onnxruntime.NodeArg`)."""
    names = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
    element: str = names.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    return element
