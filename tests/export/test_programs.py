"""The programs of docs/one_file_*.md are run as they are written, where they can."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdflow.export.one_file import Wanted, export_one_file
from sdflow.runtime.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
NOT_THERE = ("sdflow", "torch", "diffusers", "transformers", "onnx", "PIL")
TEXTS = [
    "", "a horse on the moon", "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß", "日本語 の 絵", "a_b c-d 12,345.67",
    "we'll they've I'd don't 'quoted'", "emoji 🐎🌕 and ½ ² Ⅷ", "tab\tnew\nline", "x" * 300, "word " * 100, "!'s '!!'",
]  # fmt: skip


def program(language: str) -> str:
    page = (ROOT / f"docs/one_file_{language}.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.M | re.S)
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


NODE = shutil.which("node")
NODE_MODULES = Path(os.environ.get("NODE_PATH", ROOT / "node_modules"))
TELLS = """
for (const [name, tensor] of Object.entries(feeds)) config[name] = { dims: tensor.dims, values: [...tensor.data] };
delete config.tokenizers;
fs.writeFileSync(`${out}.json`, JSON.stringify(config));
"""


@pytest.mark.skipif(
    NODE is None or not (NODE_MODULES / "onnxruntime-node").is_dir(), reason="npm install onnxruntime-node, NODE_PATH"
)
def test_the_javascript_program_draws(graph: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    text = TEXTS[2]
    (tmp_path / "draw.mjs").write_text(program("javascript") + TELLS, encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES, target_is_directory=True)
    command = [str(NODE), "draw.mjs", str(graph), text, "out.png", "3", TEXTS[3]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fed = json.loads((tmp_path / "out.png.json").read_bytes())
    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    for name, given in (("input_ids", text), ("negative_input_ids", TEXTS[3])):
        assert fed[name]["values"] == tokenizer(given, padding="max_length", max_length=77).input_ids
    noise = np.array(fed["latents"]["values"], np.float32).reshape(fed["latents"]["dims"])
    assert abs(noise.mean()) < 0.2
    assert abs(noise.std() - 1) < 0.2
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1)
    wanted = pipeline(text, negative_prompt=TEXTS[3], num_inference_steps=2, latents=noise).images[0]
    found = np.asarray(Image.open(tmp_path / "out.png"), np.int16)
    assert abs(found - np.asarray(wanted, np.int16)).max() <= 1, "a rounding apart at most"


def test_the_python_programs_tokens_are_transformers(graph: Path, tiny_pipeline: Path) -> None:
    from transformers import CLIPTokenizer

    read: dict[str, Any] = {}
    exec(program("python").replace("main(*sys.argv[1:])", ""), read)
    table = json.loads(Path(f"{graph}.json").read_bytes())["tokenizers"]["input_ids"]
    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    for text in TEXTS:
        options = {"padding": "max_length", "max_length": 77, "truncation": True}
        assert read["token_ids"](text, table)[0].tolist() == tokenizer(text, **options).input_ids, text
