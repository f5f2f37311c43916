"""The demo of the manual builds its page, and what the page calls draws."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sdflow.runtime.files.image_text_reading import read_image_settings

PAGE = Path(__file__).parents[2] / "docs/tutorials/gradio.md"


def test_the_demo_of_the_manual_draws(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio", reason="pip install gradio")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(# demo\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    module: Any = ModuleType("demo")
    exec(compile(block, "demo.py", "exec"), module.__dict__)
    demo = module.make_demo(str(tiny_pipeline))
    labels = [each.label for each in demo.input_components]
    assert labels == ["Prompt", "Negative prompt", "Steps", "Guidance scale", "Seed (-1: random)"]
    file, seed = demo.fn("a cat", "", 1, 5.0, 7, progress=lambda done: None)
    found = read_image_settings(tmp_path / file)
    assert (seed, found.prompt, found.seed, found.settings["steps"]) == (7, "a cat", 7, 1)
