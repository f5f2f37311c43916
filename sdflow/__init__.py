"""sdflow: declarative Stable Diffusion pipelines on ONNX Runtime.

Programs take `Pipeline` from here to draw, `Pass` and `PassConfig` from `sdflow.passes.base` for passes of their own, and
`deploy`, `query` and `terminate` from `sdflow.serve.client` for servers. All else is there for the commands, and may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Pipeline`, imported when it is asked for: the commands that draw nothing need none of it. Type checkers read
    `__init__.pyi`."""
    if name == "Pipeline":
        return import_module("sdflow.runtime.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
