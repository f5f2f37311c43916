"""What the page does with LoRAs and with a safety checker, in a real browser before a real server."""

from __future__ import annotations

import io
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import PIL.Image
import pytest
from serve.test_page import browser, fill, finished, opened, pytestmark
from started_python import Command

from tests.serve.conftest import RunningServer, running_server

ROOT = Path(__file__).parents[2]

__all__ = ["browser", "pytestmark"]


@pytest.fixture(scope="module")
def strict(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small pipeline, with a safety checker that flags every image."""
    folder = tmp_path_factory.mktemp("strict") / "strict"
    shutil.copytree(tiny_pipeline, folder)
    path = folder / "safety_checker/model.onnx"
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("embeds_weights"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, -2, np.float32), tensor.name))
    path.unlink()  # it may be a link into a cache
    onnx.save(model, path)
    return folder


@pytest.fixture(scope="module")
def server(sdflow: Command, strict: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Of the sample pipeline with its LoRAs, and of the strict one."""
    folder = tmp_path_factory.mktemp("shapes")
    done = sdflow("run", str(ROOT / "workflows/shapes_cpu.yaml"), "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    options = ("--loras", str(ROOT / "samples/loras"), "--cache", str(folder / "cache"), "--batch-sizes", "1")
    with running_server(str(folder / "pipelines/shapes_cpu"), str(strict), *options, "--no-check") as made:
        yield made


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[Any]:
    with opened(browser, server) as page:
        page.wait_for_selector(".lora")
        yield page


def drawn(page: Any, count: int = 1) -> list[str]:
    """Draw in an empty list, and what became of it: the images' sources."""
    if page.is_visible("#remove_all"):
        page.click("#remove_all")
    page.click("#draw")
    finished(page, count)
    return [image.get_attribute("src") for image in page.query_selector_all("img.finished")]


def pixels(source: str) -> bytes:
    """Of an image, without its text."""
    with PIL.Image.open(io.BytesIO(b64decode(source.split(",")[1]))) as image:
        return bytes(image.tobytes())


def test_a_lora_is_taken_by_its_slider_and_given_up_again(page: Any) -> None:
    fill(page, width=128, height=128, steps=4, seed=3)
    (plain,) = drawn(page)
    page.locator("[aria-label='Scale of stripes']").fill("0.8")
    assert page.is_checked("[aria-label='Use stripes']")
    (striped,) = drawn(page)
    assert striped != plain
    assert "stripes 0.8" in page.inner_text("#images figcaption")
    page.uncheck("[aria-label='Use stripes']")
    assert drawn(page) == [plain]
    page.click("#history li:nth-child(2) button")  # the one with the LoRA
    assert page.is_checked("[aria-label='Use stripes']")
    assert drawn(page) == [striped]


def test_two_scales_are_drawn_side_by_side_from_one_seed(page: Any) -> None:
    fill(page, width=128, height=128, steps=4, seed=3)
    (plain,) = drawn(page)
    page.click("#compare summary")
    page.select_option("#compare_lora", "stripes")
    page.fill("#compare_first", "0")
    page.fill("#compare_second", "1")
    first, second = drawn(page, 2)
    assert pixels(first) == pixels(plain) != pixels(second), "their texts name the LoRA"
    captions = [each.inner_text() for each in page.query_selector_all("#images figcaption")]
    assert [each.split("\n")[0] for each in captions] == ["stripes at 0", "stripes at 1"]
    assert all("seed 3" in each for each in captions)


def test_what_the_safety_checker_holds_back_is_drawn_again_up_to_the_limit(page: Any) -> None:
    assert page.is_hidden("#safety")
    page.select_option("#model", "strict")
    assert page.is_visible("#safety")
    fill(page, seed=7)
    page.check("#until_passed")
    page.fill("#attempts", "2")
    drawn(page)
    caption = page.inner_text("#images figcaption")
    assert "seed 8" in caption and "Blocked by" in caption and "2 attempts" in caption
    assert page.query_selector("#history li") is None, "what is held back is not kept"
