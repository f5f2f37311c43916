"""Workflows: YAML in, validated frozen data out.

`load_workflow` is imported on first access: it needs pydantic and PyYAML, which the data does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdflow.config.load import load_workflow
    from sdflow.config.schema import json_schema

__all__ = ["json_schema", "load_workflow"]


def __getattr__(name: str) -> Any:
    if name == "load_workflow":
        from sdflow.config.load import load_workflow

        return load_workflow
    if name == "json_schema":
        from sdflow.config.schema import json_schema

        return json_schema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
