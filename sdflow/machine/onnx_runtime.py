"""ONNX Runtime itself: its import with its telemetry off, its errors, its names of types."""

from __future__ import annotations

import os
from typing import Any

from sdflow.errors import TargetUnavailableError
from sdflow.targets import Target


def import_onnxruntime(target: Target | None = None) -> Any:
    """ONNX Runtime with its telemetry off.

    Raises TargetUnavailableError when no ONNX Runtime is installed.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read at import; without it a device id is written under HOME
    try:
        import onnxruntime
    except ImportError as error:
        raise TargetUnavailableError(
            f"ONNX Runtime cannot be imported: {error}",
            where=target.name if target else None,
            remedy=f"pip install {target.package if target else 'onnxruntime'}",
        ) from error
    onnxruntime.disable_telemetry_events()
    # cuDNN's complaint about each engine that it tries and cannot use. What is an error raises one.
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def onnxruntime_errors(ort: Any) -> tuple[type[Exception], ...]:
    """What making or running a session raises; ONNX Runtime's own errors have no common base."""
    state = ort.capi.onnxruntime_pybind11_state
    names = ("Fail", "EPFail", "NotImplemented", "InvalidGraph", "InvalidProtobuf", "InvalidArgument", "NoSuchFile")
    # (what it says may hold bytes of the model that are no text)
    return (RuntimeError, UnicodeDecodeError, state.RuntimeException, *(getattr(state, name) for name in names))


def numpy_type(value: Any) -> str:
    """The numpy type name of a session's input or output (`onnxruntime.NodeArg`)."""
    names = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
    element: str = names.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    return element
