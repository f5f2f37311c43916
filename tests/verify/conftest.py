"""Small graphs and pipelines to verify, and to damage."""

from __future__ import annotations

from tests.weights.conftest import built  # noqa: F401
