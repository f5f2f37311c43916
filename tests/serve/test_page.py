"""The page in a real browser, before a real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from until import until

from tests.serve.conftest import SIZE, RunningServer

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tried with Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,  # a browser beside the server beside other tests
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tried in Chromium, which is not installed"),
]
PATIENCE = 60_000
"""Milliseconds; nothing is timed here, and machines are slow."""
POLICY = "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
"""Neither scripts nor styles within the page, and nothing from elsewhere."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def holds(page: Any, expression: str) -> None:
    """Waits until it is true. Playwright's own waiting evaluates strings in the page, which its policy forbids."""
    until(lambda: bool(page.evaluate(expression)), expression)


def under_policy(route: Any) -> None:
    """Pass a page on with a strict Content-Security-Policy."""
    answer = route.fetch()
    route.fulfill(response=answer, headers={**answer.headers, "content-security-policy": POLICY})


@contextmanager
def opened(browser: Any, server: RunningServer) -> Iterator[Any]:
    """The page after loading. The test fails for errors of its scripts, requests to other hosts, and what its policy forbids."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = (server.url, "data:", "blob:")
    page.on("console", lambda said: "Content Security Policy" in said.text and wrong.append(said.text))
    for path in ("/", "/docs"):
        page.route(f"{server.url}{path}", under_policy)
    page.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
    page.goto(server.url)
    holds(page, "document.querySelector('#model').options.length > 0 && document.querySelector('#width').value")
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[Any]:
    with opened(browser, server) as page:
        yield page


def fill(page: Any, prompt: str = "a red circle", **values: object) -> None:
    page.fill("#prompt", prompt)
    width, height = SIZE.split("x")
    for name, value in {"width": width, "height": height, "steps": 2, **values}.items():
        page.fill(f"#{name}", str(value))


def finished(page: Any, count: int) -> None:
    """So many images are there, and none is being generated."""
    holds(page, f"document.querySelectorAll('img.finished').length === {count}")
    holds(page, "document.querySelector('#cancel').disabled")


def captions(page: Any) -> list[str]:
    return [each.inner_text() for each in page.query_selector_all("#images figcaption")]


def test_a_grid_fills_and_the_settings_of_an_image_can_be_used_again(page: Any) -> None:
    fill(page, count=2, seed=7, guidance_scale=3)
    page.keyboard.press("Control+Enter")
    finished(page, 2)
    assert [caption.split(",")[0] for caption in captions(page)] == ["seed 7", "seed 8"]
    holds(page, "document.querySelector('#status').innerText === 'All are done.'")
    sources = [image.get_attribute("src") for image in page.query_selector_all("img.finished")]
    assert sources[0] != sources[1]
    page.reload()
    page.wait_for_selector("#history li")
    page.fill("#prompt", "something else")
    page.click("#history li:last-child button")  # of the first image
    assert page.input_value("#prompt") == "a red circle"
    assert (page.input_value("#seed"), page.input_value("#guidance_scale")) == ("7", "3")
    page.fill("#count", "1")
    page.click("#draw")
    finished(page, 1)
    assert page.get_attribute("img.finished", "src") == sources[0], "the same settings draw the same image"


def test_what_is_not_read_of_a_prompt_is_shown_with_the_image(page: Any) -> None:
    fill(page, prompt="an otter " * 100, seed=1)
    page.click("#draw")
    finished(page, 1)
    (warning,) = [each.inner_text() for each in page.query_selector_all("#images .warning")]
    assert warning.startswith("Warning: a prompt has 202 tokens, but the text_encoder reads 77: the rest is ignored: '")
    fill(page, seed=1)
    page.click("#draw")
    finished(page, 2)
    assert len(page.query_selector_all("#images .warning")) == 1


def test_an_image_shows_how_far_it_is_and_can_be_cancelled(page: Any, server: RunningServer) -> None:
    fill(page, steps=150)
    page.click("#draw")
    page.wait_for_selector("img.unfinished")
    assert "Step " in captions(page)[0]
    page.keyboard.press("Escape")
    holds(page, "document.querySelector('#images figcaption').innerText === 'Cancelled.'")
    assert page.is_disabled("#cancel")
    assert page.query_selector("#images .wrong") is None and page.is_hidden("#problem"), "it is no error"
    page.click("#images button:has-text('Try again')")
    page.wait_for_selector("img.unfinished")
    page.click("#images button:has-text('Cancel')")
    holds(page, "document.querySelector('#images figcaption').innerText === 'Cancelled.'")


def test_an_image_goes_on_from_another_and_into_a_mask(page: Any, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (96, 64), (20, 60, 200)).save(tmp_path / "blue.png")
    page.set_input_files("#start_file", str(tmp_path / "blue.png"))
    page.wait_for_selector("#mask")
    fill(page, seed=1)
    page.click("#draw")
    finished(page, 1)
    whole = page.get_attribute("img.finished", "src")
    page.focus("#mask")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    box = page.query_selector("#mask").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5)
    page.mouse.up()
    page.click("#draw")
    finished(page, 2)
    assert page.get_attribute("img.finished", "src") != whole, "what is outside the mask stays"
    page.click("#images li:first-child >> text=Start from it")
    holds(page, "document.querySelector('#start_image').naturalWidth === 64")


def test_the_api_can_be_read_and_tried(page: Any) -> None:
    page.click("text=API")
    page.click("summary:has(code:text-is('/v1/images/generations'))")
    form = page.locator("form[aria-label='Try POST /v1/images/generations']")
    assert "negative_prompt" in form.locator("table").inner_text()
    form.locator("textarea").fill(f'{{"prompt": "a", "size": "{SIZE}", "steps": 1}}')
    form.locator("text=Try it").click()
    form.locator("img").wait_for()
    assert '"seed"' in form.locator("pre").inner_text()
    form.locator("textarea").fill('{"prompt": "a", "steps": 1000}')
    form.locator("text=Try it").click()
    form.locator(".problem").wait_for()
    assert "at most 150" in form.locator(".problem").inner_text()


def test_what_the_server_refuses_is_told_in_its_words(page: Any) -> None:
    fill(page, prompt="far too long " * 400)
    page.click("#draw")
    page.wait_for_selector("#problem:not([hidden])")
    assert "characters" in page.inner_text("#problem")
    assert "Traceback" not in page.inner_text("body")


def test_a_file_that_is_no_image_is_told(page: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("no image")
    page.set_input_files("#start_file", str(tmp_path / "notes.png"))
    page.wait_for_selector("#problem:not([hidden])")
    assert "notes.png is not an image" in page.inner_text("#problem")
    assert page.is_hidden("#start_tools")


def test_a_server_that_dies_and_comes_back_is_told_and_draws_again(page: Any, server: RunningServer) -> None:
    fill(page, steps=150)
    page.click("#draw")
    page.wait_for_selector("img.unfinished")
    begin = len(server.lines)
    server.worker().kill()
    page.wait_for_selector("#server:not([hidden])")
    assert page.query_selector("#images .wrong") is not None
    server.wait_until_ready(begin)
    page.wait_for_selector("#server", state="hidden")
    fill(page)
    page.click("#draw")
    finished(page, 1)


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_is_cut_off_at_any_width(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button')].filter(
            each => !each.labels?.length && !each.getAttribute('aria-label') && !each.innerText).map(each => each.id)"""
    )
    assert unnamed == [], "every control has a name that is read out"
