"""What the scripts that take the manual's screenshots share: their arguments, Chromium, and light and dark PNG files."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image
from playwright.sync_api import sync_playwright

SCHEMES = ("light", "dark")
PATIENCE = 600_000
"""Milliseconds that a page may take to generate images."""


def arguments(about: str | None, out: Path) -> argparse.Namespace:
    """`url` of the server, and `out`, the folder of the files, from the command line. about: the script's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


@contextmanager
def chromium_page() -> Iterator[Any]:
    """A page in the installed Chromium."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


def shoot(page: Any, path: Path, *, full_page: bool = False) -> None:
    """Write PATH_light.png and PATH_dark.png, of the whole page or of what is in view."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        shot = PIL.Image.open(io.BytesIO(page.screenshot(full_page=full_page)))
        shot.convert("RGB").quantize(256).save(f"{path}_{scheme}.png", optimize=True)
