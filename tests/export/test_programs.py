"""The programs of docs/one_file.md are run as they are written, where they can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdflow.export.one_file import Wanted, export_one_file
from sdflow.runtime.pipeline import Pipeline

PAGE = Path(__file__).parents[2] / "docs/one_file.md"
NOT_THERE = ("sdflow", "torch", "diffusers", "transformers", "onnx", "PIL")
TEXTS = [
    "", "a horse on the moon", "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß", "日本語 の 絵", "a_b c-d 12,345.67",
    "we'll they've I'd don't 'quoted'", "emoji 🐎🌕 and ½ ² Ⅷ", "tab\tnew\nline", "x" * 300, "word " * 100, "!'s '!!'",
]  # fmt: skip


def program(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    return str(block)


@pytest.fixture(scope="module")
def graph(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "tiny.onnx"
    export_one_file(tiny_pipeline, out, Wanted(steps=2))
    return out


@pytest.fixture(scope="module")
def drawn(tiny_pipeline: Path) -> np.ndarray:
    """The image of the programs' noise, by the pipeline: 8 bits."""
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1)
    size = pipeline.latents
    noise = np.random.default_rng(3).standard_normal((1, size.channels, size.size, size.size), np.float32)
    found = pipeline("a horse", negative_prompt="", num_inference_steps=2, latents=noise).images[0]
    return np.asarray(found, np.int16)


def test_the_python_program_draws_without_sdflow(graph: Path, drawn: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(program("python"), encoding="utf-8")
    for name in NOT_THERE:
        (tmp_path / "nothing" / name).mkdir(parents=True)
        (tmp_path / "nothing" / name / "__init__.py").write_text("raise ImportError('only onnxruntime and numpy')")
    command = [sys.executable, "draw.py", str(graph), "a horse", "out.png", "3"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "nothing")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.asarray(Image.open(tmp_path / "out.png"), np.int16)
    assert found.shape == drawn.shape
    assert abs(found - drawn).max() <= 1, "a rounding apart at most"


def test_the_python_programs_tokens_are_transformers(graph: Path, tiny_pipeline: Path) -> None:
    from transformers import CLIPTokenizer

    read: dict[str, Any] = {}
    exec(program("python").replace("main(*sys.argv[1:])", ""), read)
    table = json.loads(Path(f"{graph}.json").read_bytes())["tokenizers"]["input_ids"]
    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    for text in TEXTS:
        options = {"padding": "max_length", "max_length": 77, "truncation": True}
        assert read["token_ids"](text, table)[0].tolist() == tokenizer(text, **options).input_ids, text
