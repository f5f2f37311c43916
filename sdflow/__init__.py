"""sdflow: declarative Stable Diffusion pipelines on ONNX Runtime.

Public API: `Pipeline` here, `Pass` and `PassConfig` in `sdflow.passes.base`, and `deploy`, `query` and `terminate` in
`sdflow.serve.client`. Everything else serves the commands and may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `Pipeline` on first access: commands that generate nothing do not need it. Type checkers read
    `__init__.pyi`."""
    if name == "Pipeline":
        return import_module("sdflow.runtime.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
