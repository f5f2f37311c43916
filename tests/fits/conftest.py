from __future__ import annotations

import pytest

from sdflow.fits import estimate


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of these tests are those of Linux, where weights can be streamed."""
    monkeypatch.setattr(estimate, "STREAMS", True)
