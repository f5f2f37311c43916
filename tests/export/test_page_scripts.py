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

from sdflow.export import web_runtime
from sdflow.export.browser import PAGE
from sdflow.export.program_data import clip_table

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the page's scripts are tried in Node, which is not installed")
TEXTS = [
    "", "a horse on the moon", "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß", "日本語 の 絵", "a_b c-d 12,345.67",
    "we'll they've I'd don't 'quoted'", "emoji 🐎🌕 and ½ ² Ⅷ", "tab\tnew\nline", "x" * 300, "word " * 100, "!'s '!!'",
    "constructor toString __proto__", "ＦＵＬＬ width, Å and Å", "ΟΔΟΣ ΣΑΣ İstanbul",
    "<|endoftext|> cat", "a<|startoftext|>b <|ENDOFTEXT|>", "e<|endoftext|>\u0301 <|end<|endoftext|>oftext|>",
]  # fmt: skip


def run(script: str, given: Any, tmp_path: Path) -> Any:
    """What a script prints as JSON, given this on its standard input as `given`."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for path in PAGE.glob("*.js"):
        shutil.copy(path, tmp_path)
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


CDN = web_runtime.CDN
HOME = "https://host.example/draw/page.html?model=x"


@pytest.mark.parametrize(
    ("asked", "listed", "found"),
    [
        (None, {"folder": "./"}, "https://host.example/draw/"),
        ("elsewhere/", {"folder": "./"}, "https://host.example/draw/elsewhere/"),
        ("/ort/", {"folder": CDN}, "https://host.example/ort/"),
        (None, {"folder": CDN}, CDN),
        ("cdn", {"folder": "./"}, CDN),
        (CDN, {"folder": "./"}, CDN),
        ("https://evil.example/", {"folder": "./"}, None),
        ("//evil.example/", {"folder": "./"}, None),
        ("http://host.example/", {"folder": "./"}, None),
        ("https://host.example:8443/", {"folder": "./"}, None),
        ("blob:https://host.example/1", {"folder": "./"}, None),
        ("data:text/javascript,", {"folder": "./"}, None),
        ("https://", {"folder": "./"}, None),
        (None, {"folder": "https://evil.example/"}, None),
        (None, {"folder": CDN.replace("onnxruntime-web", "evil")}, None),
        (None, {"folder": f"{CDN}../../evil@1.0.0/"}, None),
        ("cdn", {"folder": "./", "version": "1.30.0/../../evil@1.0.0"}, None),
        ("cdn", {"folder": "./", "version": "latest"}, None),
    ],
)
def test_scripts_come_from_the_pages_site_or_the_cdn(
    asked: str | None, listed: dict[str, str], found: str | None, tmp_path: Path
) -> None:
    """Links and the pipeline.json of a foreign model may come from anybody."""
    script = """import { runtimeFolder } from "./engine.js";
let told;
try { told = runtimeFolder(given.asked, given.listed, given.page); } catch (error) { told = [error.message, error.remedy]; }
console.log(JSON.stringify(told));"""
    told = run(script, {"asked": asked, "listed": {"version": web_runtime.VERSION, **listed}, "page": HOME}, tmp_path)
    if found is None:
        assert told[0].startswith("ONNX Runtime Web is not loaded from ") and "?ort=cdn" in told[1]
    else:
        assert told == found
