"""The scripts of the browser's page that compute without a browser, in Node: noise as PyTorch's, tokens as transformers'."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPTokenizer

from sdflow.export.browser import PAGE
from sdflow.export.program_data import clip_table

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the page's scripts are tried in Node, which is not installed")
TEXTS = [
    "", "a horse on the moon", "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß", "日本語 の 絵", "a_b c-d 12,345.67",
    "we'll they've I'd don't 'quoted'", "emoji 🐎🌕 and ½ ² Ⅷ", "tab\tnew\nline", "x" * 300, "word " * 100, "!'s '!!'",
    "constructor toString __proto__", "ＦＵＬＬ width, Å and Å",
]  # fmt: skip


def run(script: str, given: Any, tmp_path: Path) -> Any:
    """What a script prints as JSON, given this on its standard input as `given`."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name in ("noise.js", "tokenizer.js"):
        shutil.copy(PAGE / name, tmp_path)
    read = "import fs from 'node:fs'; const given = JSON.parse(fs.readFileSync(0, 'utf8'));"
    (tmp_path / "tried.js").write_text(f"{read}\n{script}\n", encoding="utf-8")
    done = subprocess.run(
        [str(NODE), "tried.js"], cwd=tmp_path, input=json.dumps(given).encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", [0, 7, 4_294_967_295])
def test_a_seed_gives_the_noise_that_pytorch_gives(seed: int, tmp_path: Path) -> None:
    counts = [16, 4 * 64 * 64, 1003, 4 * 8 * 16]
    script = """import { normals } from "./noise.js";
const next = normals(given.seed);
console.log(JSON.stringify(given.counts.map((count) => [...next(count)])));"""
    found = run(script, {"seed": seed, "counts": counts}, tmp_path)
    generator = torch.Generator().manual_seed(seed)
    for count, values in zip(counts, found, strict=True):
        wanted = torch.randn(count, generator=generator).numpy()
        np.testing.assert_allclose(np.array(values, np.float32), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["shapes"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = ROOT / "samples" / name / "tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    script = """import { tokenizer } from "./tokenizer.js";
const read = tokenizer(given.table);
console.log(JSON.stringify(given.texts.map((text) => { const { ids, dropped } = read(text); return [[...ids], dropped]; })));"""
    found = run(script, {"table": clip_table(tokenizer, name), "texts": TEXTS}, tmp_path)
    for text, (ids, dropped) in zip(TEXTS, found, strict=True):
        options = {"padding": "max_length", "max_length": 77}
        assert ids == tokenizer(text, **options, truncation=True).input_ids, text
        assert dropped == max(0, len(tokenizer(text).input_ids) - 77), text
