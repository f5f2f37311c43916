"""Fixtures of the verification's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sample_artifacts import code_cache, cuda, sample_cases, sample_checkpoint  # noqa: F401
