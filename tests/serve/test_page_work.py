"""The page as somebody uses it all day: its queue, keeping and reading settings, LoRAs that are uploaded, the mask's tools. In
a real browser, before a real server."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from safetensors.numpy import load_file, save_file
from serve.test_page import browser, captions, fill, finished, holds, opened, page, pytestmark
from until import until

from tests.serve.conftest import RunningServer, running_server

ROOT = Path(__file__).parents[2]
AXE = os.environ.get("AXE_CORE", "")

__all__ = ["browser", "page", "pytestmark"]


def mask_share(page: Any) -> float:
    """The part of the image that is painted."""
    share: float = page.evaluate(
        """(() => {
            const mask = document.querySelector('#mask');
            const { data } = mask.getContext('2d').getImageData(0, 0, mask.width, mask.height);
            return data.filter((value, index) => index % 4 === 3 && value > 200).length / (mask.width * mask.height);
        })()"""
    )
    return share


def stroke(page: Any, left: float, right: float, down: float = 0.5) -> None:
    box = page.query_selector("#mask").bounding_box()
    page.mouse.move(box["x"] + box["width"] * left, box["y"] + box["height"] * down)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * right, box["y"] + box["height"] * down, steps=4)
    page.mouse.up()
    page.mouse.move(0, 0)


def drop(page: Any, selector: str, path: Path, kind: str) -> None:
    """A file, onto an element."""
    script = """async ([selector, encoded, name, type]) => {
        const bytes = Uint8Array.from(atob(encoded), letter => letter.charCodeAt(0));
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([bytes], name, { type }));
        const options = { dataTransfer, bubbles: true, cancelable: true };
        for (const kind of ['dragover', 'drop']) document.querySelector(selector).dispatchEvent(new DragEvent(kind, options));
    }"""
    page.evaluate(script, [selector, b64encode(path.read_bytes()).decode(), path.name, kind])


def test_a_second_request_waits_for_the_first_and_all_are_tried_again(page: Any) -> None:
    fill(page, steps=150, count=3, seed=1)
    page.click("#draw")
    page.wait_for_selector("img.unfinished")
    assert " s left" in page.inner_text("#images") or "Step 1 " in page.inner_text("#images")
    fill(page, steps=150, count=3, seed=10)
    page.click("#draw")
    holds(page, "document.querySelector('#status').innerText === 'Generating 4, 2 in the queue.'")
    assert len(captions(page)) == 6 and "Cancelled." not in captions(page)
    page.keyboard.press("Escape")
    holds(page, "document.querySelector('#cancel').disabled")
    assert captions(page) == ["Cancelled."] * 6
    assert page.is_hidden("#problem") and page.query_selector("#images .wrong") is None
    page.click("#retry_all")
    holds(page, "!document.querySelector('#cancel').disabled")
    page.wait_for_selector("img.unfinished")
    page.keyboard.press("Escape")
    holds(page, "document.querySelector('#cancel').disabled")
    page.click("#images li:first-child >> text=Remove")
    assert len(captions(page)) == 5
    page.click("#remove_all")
    assert captions(page) == [] and page.inner_text("#status") == "No images yet."


def test_an_image_is_seen_whole_saved_and_deleted(page: Any) -> None:
    fill(page, count=2, seed=7)
    page.click("#draw")
    finished(page, 2)
    page.click("[aria-label='Full size: seed 7']")
    assert "64x64, 1 of 2" in page.inner_text("#viewer")
    page.keyboard.press("ArrowRight")
    assert "2 of 2" in page.inner_text("#viewer") and page.is_disabled("#viewer_next")
    page.click("#viewer_actual")
    assert page.query_selector("#viewer_image").bounding_box()["width"] == 64
    page.keyboard.press("Escape")
    holds(page, "!document.querySelector('#viewer').open")
    names = []
    page.on("download", lambda file: names.append(file.suggested_filename))
    page.click("#download_all")
    until(lambda: bool(page.evaluate("1")) and sorted(names) == ["7.png", "8.png"])
    page.click("#history li:first-child >> text=Delete")
    assert len(page.query_selector_all("#history li")) == 1


def test_settings_stay_over_a_reload(page: Any) -> None:
    fill(page, prompt="a blue square", steps=7, guidance_scale=3.5, seed=99, negative_prompt="red")
    page.select_option("#scheduler", "ddim")
    page.check("#weighted")
    page.reload()
    holds(page, "document.querySelector('#width').value === '64'")
    names = ("prompt", "negative_prompt", "steps", "guidance_scale", "seed", "scheduler")
    assert [page.input_value(f"#{name}") for name in names] == ["a blue square", "red", "7", "3.5", "99", "ddim"]
    assert page.is_checked("#weighted")


def test_seeds_and_shapes(page: Any) -> None:
    assert page.is_disabled("#last_seed")
    fill(page)
    page.select_option("#preset", label="1:1 (128x128)")
    assert (page.input_value("#width"), page.input_value("#height")) == ("128", "128")
    page.fill("#width", "64")
    assert page.input_value("#preset") == ""
    page.fill("#height", "64")
    page.click("#draw")
    finished(page, 1)
    used = captions(page)[0].split(",")[0].removeprefix("seed ")
    page.click("#last_seed")
    assert page.input_value("#seed") == used
    page.click("#random_seed")
    assert page.input_value("#seed") == ""


@pytest.mark.parametrize("form", ["sdflow", "parameters", "invokeai_metadata"])
def test_the_settings_of_an_image_are_read_back_when_it_is_dropped(page: Any, tmp_path: Path, form: str) -> None:
    """Of this program, of A1111's webui, and of InvokeAI."""
    from PIL.PngImagePlugin import PngInfo

    fill(page, prompt="a blue square", steps=3, guidance_scale=3.5, seed=99, negative_prompt="red")
    page.select_option("#scheduler", "ddim")
    page.click("#draw")
    finished(page, 1)
    source = page.get_attribute("img.finished", "src")
    (tmp_path / "whole.png").write_bytes(b64decode(source.split(",")[1]))
    with PIL.Image.open(tmp_path / "whole.png") as image:
        text = PngInfo()
        text.add_text(form, image.info[form])
        image.save(tmp_path / "image.png", pnginfo=text)
    page.reload()
    holds(page, "document.querySelector('#width').value")
    fill(page, prompt="", negative_prompt="", seed="", steps=20, guidance_scale=7, width=128, height=128)
    page.select_option("#scheduler", "")
    drop(page, "#images", tmp_path / "image.png", "image/png")
    holds(page, "document.querySelector('#prompt').value === 'a blue square'")
    names = ("negative_prompt", "steps", "guidance_scale", "seed", "width", "height")
    assert [page.input_value(f"#{name}") for name in names] == ["red", "3", "3.5", "99", "64", "64"]
    assert page.input_value("#scheduler") == ("" if form == "invokeai_metadata" else "ddim")
    if form != "invokeai_metadata":
        page.click("#draw")
        finished(page, 1)
        assert page.get_attribute("img.finished", "src") == source or form == "parameters"
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "empty.png")
    page.set_input_files("#read_file", str(tmp_path / "empty.png"))
    page.wait_for_selector("#problem:not([hidden])")
    assert "empty.png does not contain its settings" in page.inner_text("#problem")


def test_a_mask_is_erased_undone_and_zoomed(page: Any, tmp_path: Path) -> None:
    PIL.Image.new("RGB", (256, 256), (20, 60, 200)).save(tmp_path / "blue.png")
    drop(page, "#start legend", tmp_path / "blue.png", "image/png")
    page.wait_for_selector("#mask")
    page.locator("#mask").scroll_into_view_if_needed()
    page.fill("#brush", "10")
    stroke(page, 0.1, 0.9)
    whole = mask_share(page)
    page.click("#erase")
    stroke(page, 0.4, 0.6)
    erased = mask_share(page)
    assert 0 < erased < whole
    page.click("#undo")
    assert mask_share(page) == whole
    page.focus("#mask")
    page.keyboard.press("Control+z")
    page.focus("#prompt")  # without the keyboard's brush
    assert mask_share(page) == 0 and page.is_disabled("#undo")
    page.click("#erase")
    page.fill("#zoom", "4")
    box, canvas = (page.query_selector(each).bounding_box() for each in (".canvas", "#mask"))
    assert canvas["width"] > 3.5 * box["width"]
    page.evaluate("document.querySelector('.canvas').scrollTo(0, 0)")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(0, 0)
    small = mask_share(page)
    assert 0 < small < whole / 8, "the brush is as wide on the screen, so thinner in the image"
    over = page.evaluate(
        """(() => { const box = document.querySelector('.canvas').getBoundingClientRect();
            return [[.5, .5], [.1, .1], [.9, .9]].map(([x, y]) => document.elementFromPoint(
                box.left + x * box.width, Math.min(innerHeight - 2, box.top + y * box.height)).id); })()"""
    )
    assert set(over) == {"mask"}, "nothing lies over it"


def test_every_target_is_large_enough_and_no_focus_ring_is_cut(page: Any, tmp_path: Path) -> None:
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    page.set_input_files("#start_file", str(tmp_path / "black.png"))
    fill(page, seed=1)
    page.click("#draw")
    finished(page, 1)
    page.click("#compare summary") if page.is_visible("#compare") else None
    for width in (390, 820, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = page.evaluate(
            """[...document.querySelectorAll('a, button, input, select, textarea, summary')].filter(each => each.checkVisibility()
                && !each.classList.contains('skip')).filter(each => { const box = each.getBoundingClientRect();
                return box.width < 24 || box.height < 24; }).map(each => each.id || each.outerHTML)"""
        )
        assert small == []
        page.keyboard.press("Tab")  # from now on the focus is shown
        cut = page.evaluate(
            """[...document.querySelectorAll('button, input, select, textarea, summary')].filter(each => each.checkVisibility()
                && each.type !== 'file').filter(each => {
                each.focus();
                const ring = parseFloat(getComputedStyle(each).outlineOffset) + 3, own = each.getBoundingClientRect();
                for (let over = each.parentElement; over && over !== document.body; over = over.parentElement) {
                    if (getComputedStyle(over).overflow === 'visible') continue;
                    const box = over.getBoundingClientRect();
                    if (own.left - ring < box.left || own.right + ring > box.right || own.top - ring < box.top) return true;
                }
                return false; }).map(each => each.id || each.outerHTML)"""
        )
        assert cut == []


@pytest.mark.skipif(not AXE, reason="npm pack axe-core, and AXE_CORE=package/axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, tmp_path: Path, scheme: str) -> None:
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    page.set_input_files("#start_file", str(tmp_path / "black.png"))
    fill(page, seed=1, count=2)
    page.click("#draw")
    finished(page, 2)
    page.fill("#prompt", "too long " * 500)
    page.click("#draw")
    page.wait_for_selector("#problem:not([hidden])")
    page.emulate_media(color_scheme=scheme)
    session = page.context.new_cdp_session(page)

    def violations() -> list[tuple[str, str]]:
        session.send("Runtime.evaluate", {"expression": Path(AXE).read_text()})
        run = {"expression": "axe.run().then(found => JSON.stringify(found.violations))", "awaitPromise": True}
        found = session.send("Runtime.evaluate", {**run, "returnByValue": True})
        return [(each["id"], each["nodes"][0]["html"]) for each in json.loads(found["result"]["value"])]

    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert violations() == []
    page.click("[aria-label='Full size: seed 1']")
    assert violations() == []
    page.keyboard.press("Escape")
    page.goto(f"{page.url}docs")
    page.wait_for_selector(".operation")
    assert violations() == []


@pytest.fixture(scope="module")
def with_loras(tiny_pipeline: Path, sdflow: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Of the sample pipeline, with one LoRA that names its words."""
    folder = tmp_path_factory.mktemp("shapes")
    done = sdflow("run", str(ROOT / "workflows/shapes_cpu.yaml"), "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "loras").mkdir()
    tags = {"ss_tag_frequency": json.dumps({"10_ink": {"ink drawing": 40, "a cat": 9, "monochrome": 31}})}
    save_file(load_file(ROOT / "samples/loras/stripes.safetensors"), folder / "loras/ink.safetensors", tags)
    options = ("--loras", str(folder / "loras"), "--cache", str(folder / "cache"), "--batch-sizes", "1", "--no-check")
    with running_server(str(folder / "pipelines/shapes_cpu"), *options) as server:
        yield server


def test_loras_are_uploaded_found_and_triggered(browser: Any, with_loras: RunningServer, tmp_path: Path) -> None:
    with opened(browser, with_loras) as page:
        page.wait_for_selector(".lora")
        page.set_input_files("#lora_file", str(ROOT / "samples/loras/outline.safetensors"))
        page.wait_for_selector("[aria-label='Use outline']")
        assert page.is_checked("[aria-label='Use outline']")
        page.uncheck("[aria-label='Use outline']")
        page.fill("#lora_search", "monochrome")
        assert page.is_visible("[aria-label='Use ink']") and page.is_hidden("[aria-label='Use outline']")
        page.fill("#lora_search", "nothing like it")
        assert page.is_visible("#lora_none")
        page.fill("#lora_search", "")
        fill(page, prompt="a red circle", width=128, height=128)
        page.check("[aria-label='Use ink']")
        page.click("text=ink drawing")
        assert page.input_value("#prompt") == "a red circle, ink drawing"
        assert page.is_hidden("text=a cat"), "only what most captions had"
        (tmp_path / "notes.safetensors").write_text("no LoRA")
        drop(page, "main", tmp_path / "notes.safetensors", "")
        page.wait_for_selector("#problem:not([hidden])")
        assert "no LoRA" in page.inner_text("#problem")
