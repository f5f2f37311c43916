"""Reference images on the page: edited as the prompt says, drawn images used as references, removed ones left out. In a real
browser, before a real server of the sample that edits images."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from serve.test_page import browser, fill, finished, holds, opened, pytestmark
from started_python import Command

from sdflow.samples.scene import PIXELS, PLAIN, Scene, draw
from sdflow.samples.score import read
from tests.serve.conftest import RunningServer, running_server

__all__ = ["browser", "pytestmark"]

SCENE = Scene("red", "circle", "blue", "large", "middle")


@pytest.fixture(scope="module")
def server(sdflow: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("shapes_klein")
    done = sdflow("run", "shapes_klein", "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    options = ("--cache", str(folder / "cache"), "--batch-sizes", "1", "--no-check")
    with running_server(str(folder / "pipelines/shapes_klein"), *options) as made:
        yield made


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[Any]:
    with opened(browser, server) as page:
        page.wait_for_selector("#references:not([hidden])")
        yield page


@pytest.fixture
def circle(tmp_path: Path) -> Path:
    path = tmp_path / "circle.png"
    PIL.Image.fromarray(draw(SCENE, 1, PLAIN)).save(path)
    return path


def drawn(page: Any, prompt: str, count: int) -> PIL.Image.Image:
    """The newest image, the first on the page, which has so many then."""
    fill(page, prompt, width=PIXELS, height=PIXELS, steps=4, seed=1)
    page.click("#draw")
    finished(page, count)
    source = page.get_attribute("img.finished", "src")
    return PIL.Image.open(io.BytesIO(b64decode(source.split(",")[1]))).convert("RGB")


def has_references(page: Any, count: int) -> None:
    holds(page, f"document.querySelectorAll('#reference_list img').length === {count}")


def test_references_are_edited_chained_and_removed(page: Any, circle: Path) -> None:
    page.set_input_files("#reference_files", str(circle))
    has_references(page, 1)
    edited = drawn(page, "make the circle green", 1)
    seen = read(edited)
    assert (seen.colour, seen.kind, seen.background) == ("green", "circle", "blue")

    page.click("[aria-label='Remove reference image 1']")
    has_references(page, 0)
    page.click("#images button:has-text('Use as reference')")
    has_references(page, 1)
    seen = read(drawn(page, "put it on a yellow background", 2))
    assert (seen.colour, seen.kind, seen.background) == ("green", "circle", "yellow"), "of the edited image"

    page.click("[aria-label='Remove reference image 1']")
    has_references(page, 0)
    assert drawn(page, "make the circle green", 3).tobytes() != edited.tobytes(), "drawn from the prompt alone"


def test_more_references_than_the_pipeline_takes_and_other_files_are_told(
    page: Any, circle: Path, tmp_path: Path
) -> None:
    page.set_input_files("#reference_files", [str(circle)] * 9)
    page.wait_for_selector("#problem:not([hidden])")
    assert "at most 8 reference images" in page.inner_text("#problem")
    has_references(page, 8)
    (tmp_path / "notes.png").write_text("no image")
    page.click("[aria-label='Remove reference image 8']")
    page.set_input_files("#reference_files", str(tmp_path / "notes.png"))
    holds(page, "document.querySelector('#problem').innerText.includes('notes.png is not an image')")
    has_references(page, 7)
