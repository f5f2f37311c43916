"""The page is opened in the user's browser: here a script that writes down what it is to show."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from serve.conftest import running_server
from started_python import StartedPython
from typer.testing import CliRunner
from until import PATIENCE, until

from sdflow.cli.app import app
from sdflow.errors import UsageError


def test_serve_opens_its_page(
    tiny_pipeline: Path, started_python: StartedPython | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, shown = tmp_path / "browser", tmp_path / "shown"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{shown}.part" && mv "{shown}.part" "{shown}"\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with running_server(str(tiny_pipeline), "--open", ready=False, started=started_python) as server:
        until(shown.exists)
        assert shown.read_text() == server.url
        page = httpx.get(server.url, timeout=PATIENCE)
        assert page.headers["content-type"].startswith("text/html")
        assert "<title>sdflow</title>" in page.text
        assert httpx.get(f"{server.url}/page/page.js", timeout=PATIENCE).status_code == 200


def test_interactive_takes_no_option_that_the_page_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--steps"):
        CliRunner().invoke(app, ["generate", str(tmp_path), "--interactive", "--steps", "3"], catch_exceptions=False)
