"""The page that draws in a browser: in Chromium, on the processor, with a small pipeline as one file."""

from __future__ import annotations

import functools
import http.server
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import ROOT

from sdflow.export.one_file import Wanted, export_one_file
from sdflow.runtime.pipeline import Pipeline

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tried with Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
WEB = Path(os.environ.get("NODE_PATH", ROOT / "node_modules")) / "onnxruntime-web" / "dist"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tried in Chromium, which is not installed"),
    pytest.mark.skipif(not WEB.is_dir(), reason="npm install --ignore-scripts onnxruntime-web, NODE_PATH"),
]
PATIENCE = 240_000
PROMPT, NEGATIVE, SEED, STEPS = "A red circle, 12 of them!", "blurry", 3, 2


@pytest.fixture(scope="module")
def site(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Files by HTTP, on a port that the system chooses."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "docs/browser/index.html", folder)
    export_one_file(tiny_pipeline, folder / "shapes.onnx", Wanted(steps=STEPS, checker=False, embed=True))
    (folder / "ort").symlink_to(WEB, target_is_directory=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *given: Any) -> None: ...


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.set_default_timeout(PATIENCE)
        yield opened
        browser.close()


def mulberry(seed: int, count: int) -> np.ndarray:
    """Standard normal numbers as the page makes them: mulberry32, Box and Muller."""
    state, found = seed, []

    def product(a: int, b: int) -> int:
        return (a * b) & 0xFFFFFFFF

    def uniform() -> float:
        nonlocal state
        state = (state + 0x6D2B79F5) & 0xFFFFFFFF
        t = product(state ^ (state >> 15), 1 | state)
        t = ((t + product(t ^ (t >> 7), 61 | t)) & 0xFFFFFFFF) ^ t
        return ((t ^ (t >> 14)) & 0xFFFFFFFF) / 4294967296

    for _ in range(count):
        far = math.sqrt(-2 * math.log(1 - uniform()))
        found.append(far * math.cos(2 * math.pi * uniform()))
    return np.array(found, np.float32)


def drawn(page: Any) -> tuple[np.ndarray, str]:
    """The image of the page (height, width, 3), and what the page says then."""
    page.wait_for_function("!document.getElementById('said').textContent.startsWith('loading')")
    assert page.text_content("#said") == "ready"
    for name, value in (("prompt", PROMPT), ("negative", NEGATIVE), ("seed", str(SEED))):
        page.fill(f"#{name}", value)
    page.click("#draw")
    page.wait_for_function("/steps of|failed/.test(document.getElementById('said').textContent)")
    said = page.text_content("#said")
    assert said.startswith(f"{STEPS} steps of "), said
    width, height, data = page.evaluate(
        "() => { const c = document.getElementById('image');"
        " return [c.width, c.height, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]; }"
    )
    return np.array(data, np.int16).reshape(height, width, 4)[..., :3], said


def wanted(folder: Path) -> np.ndarray:
    """The image of the same noise, by the pipeline."""
    pipeline = Pipeline.load(folder, "cpu", threads=1)
    what = pipeline.latents
    shape = (1, what.channels, what.size, what.size)
    noise = mulberry(SEED, math.prod(shape)).reshape(shape)
    (image,) = pipeline(PROMPT, negative_prompt=NEGATIVE, num_inference_steps=STEPS, latents=noise).images
    return np.asarray(image, np.int16)


def test_the_page_draws_what_the_pipeline_draws(site: str, page: Any, tiny_pipeline: Path) -> None:
    page.goto(f"{site}?device=wasm&ort=ort/")
    found, _ = drawn(page)
    assert abs(found - wanted(tiny_pipeline)).max() <= 1, "a rounding apart at most"
    assert found.std() > 10, "an image, not a grey plane"


@pytest.fixture
def page_with_webgpu() -> Iterator[Any]:
    """In a browser that knows WebGPU."""
    with playwright.sync_playwright() as driver:
        given = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=given)
        opened = browser.new_page()
        opened.set_default_timeout(PATIENCE)
        yield opened
        browser.close()


def test_without_a_webgpu_device_the_page_takes_the_processor(site: str, page_with_webgpu: Any) -> None:
    page_with_webgpu.add_init_script("if (navigator.gpu) navigator.gpu.requestAdapter = async () => null")
    page_with_webgpu.goto(f"{site}?ort=ort/")
    _, said = drawn(page_with_webgpu)
    assert " on wasm: " in said


def test_where_webgpu_refuses_a_kernel_the_page_says_so_and_takes_the_processor(
    site: str, page_with_webgpu: Any, tiny_pipeline: Path
) -> None:
    """It refuses when the first kernel is run, as with attention that has a mask, which this pipeline's has not."""
    refuse = "GPUDevice.prototype.createShaderModule = () => { throw new Error('no such kernel') }"
    page_with_webgpu.add_init_script(f"if (globalThis.GPUDevice) {refuse}")
    page_with_webgpu.goto(f"{site}?ort=ort/")
    found, said = drawn(page_with_webgpu)
    assert " on wasm: " in said
    assert abs(found - wanted(tiny_pipeline)).max() <= 1
    assert page_with_webgpu.is_visible("#fallback")
    told = page_with_webgpu.text_content("#fallback")
    assert told.startswith("WebGPU cannot run this graph here, so the processor draws. It says: "), told


def test_a_missing_graph_is_told(site: str, page: Any) -> None:
    page.goto(f"{site}?device=wasm&ort=ort/&graph=none.onnx")
    page.wait_for_function("document.getElementById('said').textContent.startsWith('failed')")
    assert "sdflow export PIPELINE --one-file none.onnx --embed" in page.text_content("#said")
