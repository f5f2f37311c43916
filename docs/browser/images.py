"""Takes the images of the page for browsers that the manual shows: two widths, light and dark.

    python docs/browser/images.py http://127.0.0.1:8000

of the sample pipeline (`sdflow export pipelines/shapes_cpu --browser page`, then `python -m http.server --directory page`).
Needs Playwright and a Chromium; the processor draws.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

import PIL.Image
from playwright.sync_api import sync_playwright

SIZES = {"wide": (1280, 860), "phone": (390, 844)}
SCHEMES = ("light", "dark")
PATIENCE = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"{given.url}?device=wasm")
        page.wait_for_selector("#settings:enabled")
        for name, value in {"prompt": "a large red circle on a blue background", "steps": "20", "seed": "4"}.items():
            page.fill(f"#{name}", value)
        page.click("#draw")
        page.wait_for_function("/^(Done|Failed)$/.test(document.getElementById('said').textContent)")
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                shot = PIL.Image.open(io.BytesIO(page.screenshot(full_page=name == "phone")))
                shot.convert("RGB").quantize(256).save(given.out / f"{name}_{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
