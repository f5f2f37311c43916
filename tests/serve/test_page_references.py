"""What the page does with the reference images of FLUX.2-klein, in a real browser before a real server."""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
from serve.conftest import running_server
from serve.test_page import browser, finished, opened, pytestmark
from serve.test_page_work import drop
from shell import Shell
from started_python import StartedPython
from until import PATIENCE

__all__ = ["browser", "pytestmark"]


def test_references_are_chosen_dropped_removed_and_sent(
    browser: Any, tmp_path: Path, started_python: StartedPython | None
) -> None:
    """The image is that of a request with the references that are left, and can be one itself."""
    shell = Shell(tmp_path, started_python)
    shell.json("run", "flux2_tiny", "--no-verify", "--no-evaluate")
    files = [tmp_path / f"{color}.png" for color in ("red", "green", "blue")]
    for file in files:
        PIL.Image.new("RGB", (80, 64), file.stem).save(file)
    options = {"environment": shell.environment(), "started": shell.started}
    with (
        running_server(str(tmp_path / "pipelines/flux2_tiny"), "--batch-sizes", "1", **options) as server,
        opened(browser, server) as page,
    ):
        page.set_input_files("#reference_files", [str(file) for file in files[:2]])
        page.wait_for_selector("[aria-label='Remove reference image 2']")
        drop(page, "#references legend", files[2], "image/png")
        page.wait_for_selector("[aria-label='Remove reference image 3']")
        page.click("[aria-label='Remove reference image 1']")
        assert len(page.query_selector_all("#reference_list img")) == 2
        for name, value in {"prompt": "an otter", "width": 80, "height": 64, "steps": 2, "seed": 1}.items():
            page.fill(f"#{name}", str(value))
        page.click("#draw")
        finished(page, 1)
        sent = {"references": [b64encode(file.read_bytes()).decode() for file in files[1:]]}
        body = {"prompt": "an otter", "size": "80x64", "steps": 2, "seed": 1, **sent}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)
        source = page.get_attribute("img.finished", "src")
        assert b64decode(source.split(",")[1]) == b64decode(answer.json()["data"][0]["b64_json"])
        page.click("#images >> text=Use as reference")
        page.wait_for_selector("[aria-label='Remove reference image 3']")
