"""Takes the images of the page for browsers that the manual shows: two widths, light and dark.

    python docs/browser/images.py http://127.0.0.1:8000

of the sample pipeline (`sdflow export pipelines/shapes_cpu --browser page`, then `python -m http.server --directory page`).
Needs Playwright and a Chromium; the processor draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from screenshots import arguments, chromium_page, shoot

SIZES = {"wide": (1280, 860), "phone": (390, 844)}


def main() -> None:
    given = arguments(__doc__, Path(__file__).parent)
    with chromium_page() as page:
        page.goto(f"{given.url}?device=wasm")
        page.wait_for_selector("#settings:enabled")
        for name, value in {"prompt": "a large red circle on a blue background", "steps": "20", "seed": "4"}.items():
            page.fill(f"#{name}", value)
        page.click("#draw")
        page.wait_for_function("/^(Done|Failed)$/.test(document.getElementById('said').textContent)")
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            shoot(page, given.out / name, full_page=name == "phone")


if __name__ == "__main__":
    main()
