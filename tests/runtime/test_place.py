"""There is one place for a device in a process: whoever works there works on one stream."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sdflow.runtime.sessions import place


def test_threads_that_ask_first_together_get_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are loaded side by side. On a GPU two streams made the first images of a process wrong."""

    def stream(index: int) -> object:
        time.sleep(0.05)  # as long as the first use of CUDA in a process, so that all threads ask meanwhile
        return object()

    monkeypatch.setattr(place, "_places", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    with ThreadPoolExecutor(5) as pool:
        places = list(pool.map(place.place, ["cuda"] * 5))
    assert len({id(place.stream) for place in places}) == 1
