"""The folder that `sdflow export --browser` writes, in Chromium: drawn on WebGPU by SwiftShader, and on the processor."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted import Converted
from file_server import FileServer, serving
from shell import ROOT
from until import until

from sdflow.build.assemble import assemble
from sdflow.export.browser import PAGE, BrowserWanted, export_browser
from sdflow.export.web_runtime import PACKAGE, VERSION, find_runtime
from sdflow.manifest import Origin
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.webgpu_attention import PROBE_SIZES, attention_probe
from sdflow.sources import PlainDigests, open_checkpoint

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tried with Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
MODULES = Path(os.environ.get("NODE_PATH", ROOT / "node_modules"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tried in Chromium, which is not installed"),
    pytest.mark.skipif(
        not (MODULES / PACKAGE).is_dir(), reason=f"npm install --ignore-scripts {PACKAGE}@{VERSION}, NODE_PATH"
    ),
]
SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
PATIENCE = 600_000
PROMPT, NEGATIVE, SEED, STEPS = "A red circle, 12 of them!", "blurry", 3, 2
MEGABYTE = 1_000_000

Draw = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def site(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    folder = tmp_path_factory.mktemp("site") / "page"
    export_browser(tiny_pipeline, folder, wanted(steps=STEPS))
    with serving(folder) as server:
        yield server


@pytest.fixture
def server(site: FileServer) -> FileServer:
    site.healthy()
    return site


def wanted(**more: Any) -> BrowserWanted:
    return BrowserWanted(find_runtime(str(MODULES / PACKAGE), ROOT), checker=False, file_bytes=MEGABYTE, **more)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *SWIFTSHADER])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """With nothing kept of other tests."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    yield page
    context.close()


def open_page(page: Any, server: FileServer, device: str = "wasm", query: str = "") -> None:
    page.goto(f"{server.url}?device={device}{query}")
    page.wait_for_function("document.getElementById('said').textContent !== 'Loading'")


def said(page: Any) -> str:
    return str(page.text_content("#said"))


def problem(page: Any) -> str:
    return str(page.text_content("#problem")) if page.is_visible("#problem") else ""


def begin(page: Any, **fields: Any) -> None:
    given = {"prompt": PROMPT, "negative": NEGATIVE, "seed": SEED, **fields}
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.click("#draw")


def finished(page: Any) -> str:
    page.wait_for_function("/^(Done|Failed|Cancelled)$/.test(document.getElementById('said').textContent)")
    return said(page)


def image(page: Any) -> np.ndarray:
    """(height, width, 3)."""
    width, height, data = page.evaluate(
        "() => { const c = document.getElementById('image');"
        " return [c.width, c.height, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]; }"
    )
    return np.array(data, np.int16).reshape(height, width, 4)[..., :3]


def drawn(page: Any, **fields: Any) -> np.ndarray:
    begin(page, **fields)
    assert finished(page) == "Done", problem(page)
    return image(page)


@functools.cache
def loaded(folder: Path) -> Pipeline:
    return Pipeline.load(folder, "cpu", threads=1)


def by_python(folder: Path, seed: int = SEED, **more: Any) -> np.ndarray:
    """The image of the same seed by diffusers' scheduler and ONNX Runtime's CPU provider."""
    options = {"negative_prompt": NEGATIVE, "num_inference_steps": STEPS, **more}
    found = loaded(folder)(PROMPT, generator=torch.Generator().manual_seed(seed), **options).images[0]
    return np.asarray(found, np.int16)


def asked_data(server: FileServer) -> list[tuple[str, int]]:
    return [each for each in server.asked if each[0].endswith((".bin", ".onnx")) or each[0] == "tokenizers.json"]


@pytest.fixture(scope="module")
def shapes(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, converted and not fused: ONNX Runtime's fused attention is wrong on SwiftShader, whose subgroups are of 4."""
    checkpoint = open_checkpoint("sample:shapes", digests=PlainDigests(), download=False)
    folder = tmp_path_factory.mktemp("shapes") / "pipeline"
    assemble(folder, parts=converted(checkpoint), companions=checkpoint.companions, origin=Origin("shapes", "cpu"))
    return folder


def test_webgpu_draws_the_sample_as_python_does(shapes: Path, page: Any, tmp_path: Path) -> None:
    size = {"height": 32, "width": 32}  # SwiftShader takes seconds for a step of the sample's own size
    export_browser(shapes, tmp_path / "page", wanted(steps=STEPS, **size))
    with serving(tmp_path / "page") as server:
        open_page(page, server, "webgpu")
        found = drawn(page)
    assert problem(page) == ""
    assert abs(found - by_python(shapes, **size)).max() <= 2, "roundings apart"
    assert found.std() > 10, "an image, not a grey plane"


def test_a_visit_fetches_once_and_draws_what_python_draws(server: FileServer, page: Any, tiny_pipeline: Path) -> None:
    open_page(page, server)
    assert page.text_content("#draw").startswith("Download ")
    first = drawn(page)
    assert abs(first - by_python(tiny_pipeline)).max() <= 1, "a rounding apart at most"
    assert len(asked_data(server)) == len({name for name, _ in asked_data(server)}) > 5, "each file once"
    server.healthy()
    open_page(page, server)
    assert page.text_content("#draw") == "Generate"
    other = {"num_inference_steps": 3, "guidance_scale": 3.5, "height": 64, "width": 96}
    found = drawn(page, seed=2**32 - 1, steps=3, guidance=3.5, height=64, width=96)
    assert found.shape == (64, 96, 3)
    assert abs(found - by_python(tiny_pipeline, 2**32 - 1, **other)).max() <= 1
    unguided = drawn(page, guidance=1, height=64, width=96)
    assert abs(unguided - by_python(tiny_pipeline, guidance_scale=1.0, height=64, width=96)).max() <= 1
    assert asked_data(server) == [], "everything was kept"


def test_deleted_files_are_gone(server: FileServer, page: Any) -> None:
    open_page(page, server)
    drawn(page)
    page.click("#delete")
    page.wait_for_function("document.getElementById('said').textContent === 'Deleted'")
    assert page.text_content("#kept") == "No files stored in this browser"
    assert page.evaluate(KEPT) == {}
    assert page.text_content("#draw").startswith("Download ")


KEPT = """async () => {
  const found = {};
  try {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("sdflow");
    for await (const handle of folder.values()) found[handle.name] = (await handle.getFile()).size;
  } catch (error) { if (error.name !== "NotFoundError") throw error; }
  return found;
}"""


def largest(server: FileServer) -> tuple[str, int, str]:
    """Name, bytes and digest of the largest file."""
    files = json.loads((server.folder / "pipeline.json").read_bytes())["files"]
    name = max(files, key=lambda each: files[each]["bytes"])
    return name, files[name]["bytes"], files[name]["sha256"]


def test_what_was_interrupted_goes_on_where_it_stopped(server: FileServer, page: Any, tiny_pipeline: Path) -> None:
    name, size, _ = largest(server)
    server.cut[name] = 2
    open_page(page, server)
    found = drawn(page)
    assert abs(found - by_python(tiny_pipeline)).max() <= 1
    begun = [begin for each, begin in server.asked if each == name]
    assert begun == [0, size // 2, size // 2 + (size - size // 2) // 2]


def test_fetching_is_cancelled_and_goes_on_with_what_is_there(server: FileServer, page: Any) -> None:
    name, size, digest = largest(server)
    server.slow.add(name)
    open_page(page, server)
    begin(page)
    until(lambda: page.evaluate(KEPT).get(digest, 0) > 0, f"blocks of {name}")
    page.click("#cancel")
    assert finished(page) == "Cancelled"
    kept = page.evaluate(KEPT)[digest]
    assert 0 < kept < size
    server.healthy()
    begin(page)
    until(lambda: (name, kept) in server.asked, "the rest")


def test_drawing_is_cancelled_between_steps(server: FileServer, page: Any) -> None:
    open_page(page, server)
    begin(page, steps=50)
    page.wait_for_function("/^Step [0-9]+ of 50/.test(document.getElementById('said').textContent)")
    page.click("#cancel")
    assert finished(page) == "Cancelled"
    assert problem(page) == ""
    drawn(page, steps=1)


def test_a_quota_that_ends_while_files_are_fetched_is_told(server: FileServer, page: Any) -> None:
    open_page(page, server)
    page.context.new_cdp_session(page).send(
        "Storage.overrideQuotaForOrigin", {"origin": server.url.rstrip("/"), "quotaSize": 100_000}
    )
    begin(page)
    assert finished(page) == "Failed"
    assert "The browser has no more space for this page's files." in problem(page)
    page.click("#delete")
    page.uncheck("#keep")
    drawn(page)
    assert page.evaluate(KEPT) == {}


def test_what_does_not_fit_is_told_before_it_is_fetched(server: FileServer, page: Any) -> None:
    """Where the browser says how much fits; Chromium says 10 GiB whatever it is."""
    says = b"navigator.storage.estimate = async () => ({ quota: 300000, usage: 200000 });\n"
    server.replaced["worker.js"] = says + (PAGE / "worker.js").read_bytes()
    open_page(page, server)
    begin(page)
    assert finished(page) == "Failed"
    assert "and this browser lets the page store 100 kB" in problem(page)
    assert asked_data(server) == []


def test_a_kept_file_that_was_damaged_is_found_and_replaced(server: FileServer, page: Any) -> None:
    name, _, digest = largest(server)
    open_page(page, server)
    first = drawn(page)
    damage = """async (digest) => {
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("sdflow");
      const stream = await (await folder.getFileHandle(digest)).createWritable({ keepExistingData: true });
      await stream.write({ type: "write", position: 1000, data: new Uint8Array([1, 2, 3, 4, 5, 6, 7, 8]) });
      await stream.close();
    }"""
    page.evaluate(damage, digest)
    open_page(page, server)
    begin(page)
    assert finished(page) == "Failed"
    assert f"{name} was damaged" in problem(page)
    server.healthy()
    assert (drawn(page) == first).all()
    assert asked_data(server) == [(name, 0)]


@pytest.mark.parametrize("kind", ["missing", "other", "shorter"])
def test_a_file_that_is_not_the_right_one_is_told(kind: str, server: FileServer, page: Any) -> None:
    name, size, _ = largest(server)
    content = (server.folder / name).read_bytes()
    server.replaced[name] = {"missing": None, "other": bytes(size), "shorter": content[:-1]}[kind]
    open_page(page, server)
    begin(page)
    assert finished(page) == "Failed"
    told = f"{name} is not on the server (404)" if kind == "missing" else f"{name} on the server is not the one"
    assert told in problem(page)


def test_a_folder_without_an_index_and_a_missing_runtime_are_told(server: FileServer, page: Any) -> None:
    open_page(page, server, query="&model=elsewhere/")
    assert "pipeline.json is not on the server (404)" in problem(page)
    open_page(page, server, query="&ort=elsewhere/")
    begin(page)
    assert finished(page) == "Failed"
    assert f"ONNX Runtime Web could not be loaded from {server.url}elsewhere/" in problem(page)


def test_another_sites_scripts_are_refused_before_anything_is_disabled(server: FileServer, page: Any) -> None:
    open_page(page, server, query="&ort=https://other.example/")
    begin(page)
    page.wait_for_selector("#problem", state="visible")
    assert "ONNX Runtime Web is not loaded from https://other.example/" in problem(page)
    assert page.is_enabled("#draw") and page.is_enabled("#prompt") and page.is_disabled("#cancel")


def test_where_the_browser_stores_nothing_visitors_can_untick_it(server: FileServer, page: Any) -> None:
    refuse = "async () => { throw new DOMException('not here', 'SecurityError'); }"
    page.add_init_script(f"StorageManager.prototype.getDirectory = {refuse};")
    open_page(page, server)
    assert "does not let the page store files" in problem(page)
    page.uncheck("#keep")
    page.wait_for_function("!document.getElementById('draw').disabled")
    assert problem(page) == ""


def test_files_that_are_in_use_are_not_said_to_be_deleted(server: FileServer, page: Any) -> None:
    open_page(page, server)
    page.evaluate("""async () => {
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("sdflow", { create: true });
      const file = await folder.getFileHandle("abc", { create: true });
      const writer = await file.createWritable();
      await writer.write("kept");
      await writer.close();
      globalThis.held = await file.createWritable();
    }""")
    for _ in range(2):
        page.click("#keep")  # so that the page counts what it keeps
    page.click("#delete")
    page.wait_for_function("document.getElementById('said').textContent === 'Failed'")
    assert "The stored files could not be deleted" in problem(page)
    page.evaluate("held.abort()")
    page.click("#delete")
    page.wait_for_function("document.getElementById('said').textContent === 'Deleted'")
    assert problem(page) == ""
    assert page.evaluate(KEPT) == {}


def test_a_device_without_float16_or_with_too_small_buffers_is_told(server: FileServer, page: Any) -> None:
    described = json.loads((server.folder / "pipeline.json").read_bytes())
    for entry, told in (({"float16": True}, "(shader-f16)"), ({"largest": 1 << 40}, "in one buffer")):
        server.replaced["pipeline.json"] = json.dumps({**described, **entry}).encode()
        open_page(page, server, "webgpu")
        page.wait_for_selector("#problem", state="visible")
        assert told in problem(page)
        begin(page)
        assert finished(page) == "Failed"
        assert told in problem(page)
    assert asked_data(server) == [], "nothing is fetched that cannot run"


def test_without_webgpu_the_processor_draws_if_the_visitor_chooses_it(
    server: FileServer, tiny_pipeline: Path, browser: Any
) -> None:
    other = browser.browser_type.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    try:
        page = other.new_page()
        page.set_default_timeout(PATIENCE)
        open_page(page, server, "webgpu")
        page.wait_for_selector("#problem", state="visible")
        assert "This browser supports WebGPU but found no GPU for it." in problem(page)
        begin(page)
        assert finished(page) == "Failed"
        assert asked_data(server) == []
        page.check("[value=wasm]")
        assert problem(page) == ""
        assert abs(drawn(page) - by_python(tiny_pipeline)).max() <= 1
        page.add_init_script("delete Navigator.prototype.gpu")
        open_page(page, server, "webgpu")
        page.wait_for_selector("#problem", state="visible")
        assert "This browser has no WebGPU." in problem(page)
    finally:
        other.close()


def test_a_device_that_computes_attention_wrongly_is_told(server: FileServer, page: Any) -> None:
    """SwiftShader's subgroups are of 4. On the processor the same attention is right."""
    described = json.loads((server.folder / "pipeline.json").read_bytes())
    probe = attention_probe()
    described["attention"] = PROBE_SIZES
    described["files"]["attention.onnx"] = {"bytes": len(probe), "sha256": hashlib.sha256(probe).hexdigest()}
    server.replaced |= {"pipeline.json": json.dumps(described).encode(), "attention.onnx": probe}
    open_page(page, server, "webgpu")
    begin(page)
    assert finished(page) == "Failed"
    assert "computes attention wrongly on this device" in problem(page)
    page.check("[value=wasm]")
    drawn(page)


TOO_LARGE = """
const make = GPUDevice.prototype.createBuffer;
let made = 0;
GPUDevice.prototype.createBuffer = function (wanted) {
  return make.call(this, ++made === NUMBER ? { ...wanted, size: 2 ** 45 } : wanted);
};
"""


@pytest.mark.parametrize("number", [8, 80], ids=["while a graph is loaded", "while it runs"])
def test_a_device_without_enough_memory_is_told(number: int, server: FileServer, page: Any) -> None:
    """The browser reports such a buffer to the device's listeners, and raises nothing."""
    fault = TOO_LARGE.replace("NUMBER", str(number)).encode()
    server.replaced["worker.js"] = fault + (PAGE / "worker.js").read_bytes()
    open_page(page, server, "webgpu")
    begin(page)
    assert finished(page) == "Failed"
    assert "The GPU ran out of memory: " in problem(page)


def test_an_isolated_page_draws_with_threads(server: FileServer, page: Any, tiny_pipeline: Path) -> None:
    server.headers |= {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
    open_page(page, server)
    assert page.evaluate("crossOriginIsolated")
    assert abs(drawn(page) - by_python(tiny_pipeline)).max() <= 1
