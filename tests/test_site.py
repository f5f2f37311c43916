"""The manual as a site: it is built without a warning, loads nothing from elsewhere, and `llms.txt` lists its pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`--strict`: a link or an anchor that leads nowhere, or a page that is not in the menu, ends it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 50
    loads = r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*\shref=\"?(https?:)?//"
    for path in pages:
        assert not re.search(loads, path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_every_page_is_listed_for_language_models_with_its_markdown(site: Path) -> None:
    listed = re.findall(r"^- \[[^]]+\]\((\S+)\)$", (site / "llms.txt").read_text(encoding="utf-8"), flags=re.M)
    pages = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"}
    assert set(listed) == pages
    assert all((site / page).read_text(encoding="utf-8").lstrip().startswith("# ") for page in listed)


def test_the_reference_has_every_command_and_the_python_api(site: Path) -> None:
    options = (site / "reference/options.md").read_text(encoding="utf-8")
    assert "## sdflow cache export" in options and "`--structures`" in options
    python = (site / "reference/python.html").read_text(encoding="utf-8")
    assert all(
        f'id="sdflow.{name}"' in python for name in ("runtime.pipeline.Pipeline.__call__", "passes.base.Pass.run")
    )


def test_figures_of_the_repository_are_pages_whose_links_stay_in_the_site(site: Path) -> None:
    figures = (site / "figures.html").read_text(encoding="utf-8")
    assert "<h1" in figures and "../docs/" not in figures
    assert 'href="figures.html"' in (site / "cache.html").read_text(encoding="utf-8")
