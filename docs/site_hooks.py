"""What MkDocs does besides rendering docs/: pages from files outside of it, every command's options, and `llms.txt`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

SUBJECTS = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/RESULTS.md"))

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "figures.md",
    "benchmarks/README.md": "figures/claims.md",
    **{f"benchmarks/{subject}/RESULTS.md": f"figures/{subject}.md" for subject in SUBJECTS},
    "benchmarks/tried.md": "figures/tried.md",
    "samples/README.md": "sample.md",
}
"""Files of the repository that the site has as pages."""

SOURCES = {page: file for file, page in OUTSIDE.items()}
OPTIONS = "reference/options.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
_pages: list[tuple[str, str, str]] = []


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/, with the images that they show."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
        for _, _, target, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            image = (ROOT / source).parent / target
            if image.suffix == ".png" and ROOT / "docs" not in image.resolve().parents:
                files.append(File.generated(config, f"outside/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages; those to other files become their text. The page of
    options gets them."""
    here = page.file.src_uri
    if here == OPTIONS:
        markdown += options()
    folder = (PurePosixPath(SOURCES[here]) if here in SOURCES else PurePosixPath("docs", here)).parent

    def rewritten(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        found = os.path.normpath(folder / target)
        if image and not found.startswith("docs/"):
            there = f"outside/{PurePosixPath(target).name}"
        elif found in OUTSIDE:
            there = OUTSIDE[found]
        elif found.startswith("docs/") and files.get_file_from_path(found.removeprefix("docs/")):
            there = found.removeprefix("docs/")
        else:
            return text
        relative = os.path.relpath(there, PurePosixPath(here).parent)
        return f"{image}[{text}]({relative}{anchor or ''})"

    return LINK.sub(rewritten, markdown)


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Remembers the pages in the order of the menu, for `llms.txt`."""
    _pages[:] = [("/".join(_sections(page)), page.title or "", page.file.src_uri) for page in nav.pages]
    return nav


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes `llms.txt` (https://llmstxt.org): the pages by section, as Markdown beside their HTML."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = None
    for above, title, uri in _pages:
        if above != section:
            section = above
            lines += ["", f"## {above or 'Start'}", ""]
        source = ROOT / SOURCES.get(uri, f"docs/{uri}")
        (site / uri).parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8") + (options() if uri == OPTIONS else "")
        (site / uri).write_text(text, encoding="utf-8")
        lines.append(f"- [{title}]({uri})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(page: Page) -> list[str]:
    return [each.title for each in reversed(page.ancestors)]


def options() -> str:
    """Arguments and options of every command, from the program itself."""
    import typer

    from sdflow.cli.app import app

    lines: list[str] = []
    for words, command in _commands(typer.main.get_command(app), ()):
        lines += ["", f"## sdflow {' '.join(words)}", "", *((command.help or "").split("\n")), ""]
        shown = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
        if shown:
            lines += ["| | | default |", "|---|---|---|"]
        for each in shown:
            spelled = [*each.opts, *each.secondary_opts] if each.param_type_name == "option" else [each.name.upper()]
            default = (
                "" if each.default in (None, (), [], "") or callable(each.default) else f"`{_shown(each.default)}`"
            )
            required = "required" if each.required else default
            what = " ".join((getattr(each, "help", None) or "").split())
            lines.append(f"| {', '.join(f'`{name}`' for name in spelled)} | {_cell(what)} | {_cell(required)} |")
    return "\n".join(lines) + "\n"


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, each in sorted(command.commands.items()):
        if hasattr(each, "commands"):
            yield from _commands(each, (*words, name))
        elif not each.hidden:
            yield (*words, name), each


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
