"""Takes the images of the page that the manual shows: three widths, light and dark.

    python docs/page_images.py http://127.0.0.1:8000

of a server of the sample pipeline with its LoRAs (`sdflow serve pipelines/shapes_cpu --loras samples/loras`). Needs Playwright
and a Chromium.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from screenshots import PATIENCE, arguments, chromium_page, shoot

SIZES = {"wide": (1280, 860), "middle": (820, 1000), "phone": (390, 844)}


def main() -> None:
    given = arguments(__doc__, Path(__file__).parent)
    with chromium_page() as page:
        page.goto(given.url)
        wait(page, "document.querySelector('#width').value && document.querySelector('.lora')")
        draw(page)
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            arrange(page, name)
            shoot(page, given.out / f"page_{name}")
        page.goto(f"{given.url}/docs")
        page.set_viewport_size({"width": 1280, "height": 860})
        page.click('summary:has(code:text-is("/v1/images/generations"))')
        shoot(page, given.out / "page_docs")


def wait(page: Any, expression: str) -> None:
    """Until it is true. Playwright's own waiting evaluates strings in the page, which its policy may forbid."""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise TimeoutError(expression)
        time.sleep(0.1)


def draw(page: Any) -> None:
    """Two images, each at two scales of a LoRA."""
    fields = {"prompt": "a large red circle on a blue background", "steps": 20, "count": 2, "seed": 3}
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    page.click("#compare summary")
    page.select_option("#compare_lora", "stripes")
    page.fill("#compare_first", "0")
    page.fill("#compare_second", "1")
    page.keyboard.press("Control+Enter")
    wait(page, "document.querySelectorAll('img.finished').length === 4")
    wait(page, "document.querySelectorAll('#history li').length === 4")


def arrange(page: Any, name: str) -> None:
    """What is to be seen: the whole page, a mask on an image, the images."""
    if name == "middle":
        page.click("#images li:first-child >> text=Start from it")
        page.wait_for_selector("#mask")
        page.evaluate("document.querySelector('#start').scrollIntoView({block: 'center'})")
        box = page.query_selector("#mask").bounding_box()
        place = [(0.3, 0.35), (0.7, 0.35), (0.3, 0.55), (0.7, 0.55)]
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
        page.mouse.down()
        for x, y in place:
            page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        page.mouse.up()
    else:
        focus = "#images_title" if name == "phone" else "header"
        page.evaluate(f"document.querySelector('{focus}').scrollIntoView()")


if __name__ == "__main__":
    main()
