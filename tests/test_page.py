"""What all reports have in common: self-contained, escaped, with title, verdict, date and facts, and made for a phone too."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from sdflow.page import document, folded, images, listed, plot, section, table, text_table

PNG = b"\x89PNG\r\n\x1a\n"


class Tags(HTMLParser):
    """Fails for tags that are not closed in order."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole() -> str:
    return document(
        "Verification of <b>",
        ("passed", "good"),
        "All is <well>.",
        [("target", "cpu"), ("model", "a & b"), ("empty", "")],
        [
            section("Table", text_table(("name", "median ms"), [("<i>", "1.5")], ("median ms",))),
            section("Images", images([("a <caption>", PNG), ("again", "iVBORw0KGgo=")])),
            section("Plot", plot("<svg></svg>")),
            section("More", folded("more", listed(["one", "two"]))),
            section("Nothing", listed([])),
        ],
        date="2026-11-25",
    )


def test_a_page_has_title_verdict_date_and_facts_and_nothing_from_elsewhere() -> None:
    text = whole()
    assert Tags(text).open == []
    assert "<title>Verification of &lt;b&gt;: passed</title>" in text
    assert '<span class="verdict good">passed</span> All is &lt;well&gt;.' in text
    assert "<dt>date</dt><dd>2026-11-25</dd><dt>target</dt><dd>cpu</dd><dt>model</dt><dd>a &amp; b</dd></dl>" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', text) == []
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert "Nothing" not in text, "a section without content is left out"


def test_what_is_wide_scrolls_by_itself_and_the_page_does_not() -> None:
    text = whole()
    for content in ("<table>", "<svg>"):
        assert f'<div class="scrolls">{content}' in text
    assert re.search(r"@media \(max-width", text)


def test_cells_are_marked_as_numbers_texts_and_rows_with_a_class() -> None:
    text = table(("a", "b"), [("<b>1</b>", "2"), ("3", "4")], numbers=("b",), rows={1: "wrong"})
    assert '<th>a</th><th class="number">b</th>' in text
    assert '<tr><td><b>1</b></td><td class="number">2</td></tr><tr class="wrong"><td>3</td>' in text
    assert "<th>" not in table(("", ""), [("1", "2")]), "no head where no column has a name"
