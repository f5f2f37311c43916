"""Small graphs and pipelines to verify, and to damage; the sample pipeline as it is built for CUDA."""

from __future__ import annotations

from tests.verify.sample_artifacts import code_cache, cuda, sample_cases, sample_checkpoint  # noqa: F401
from tests.weights.conftest import built  # noqa: F401
