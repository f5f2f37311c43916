"""sdflow: declarative Stable Diffusion pipelines on ONNX Runtime.

Public API: `Pipeline` and `read_image_settings` here, `Pass` and `PassConfig` in `sdflow.passes.base`, and `deploy`, `query`
and `terminate` in `sdflow.serve.client`. Everything else serves the commands and may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


_PUBLIC = {"Pipeline": "sdflow.runtime.pipeline", "read_image_settings": "sdflow.runtime.files.image_text_reading"}


def __getattr__(name: str) -> Any:
    """Import a public name on first access: commands that generate nothing do not need it. Type checkers read
    `__init__.pyi`."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
