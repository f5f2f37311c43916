"""`--control NAME=FILE[:SCALE[:START:END]]` as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.runtime.files.control_files import ControlFile, parse_control, require_distinct

CANNY = "canny"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("canny=edges.png", ControlFile(CANNY, Path("edges.png"))),
        ("canny=edges.png:0.8", ControlFile(CANNY, Path("edges.png"), 0.8)),
        ("canny=edges.png:0.8:0:0.6", ControlFile(CANNY, Path("edges.png"), 0.8, 0.0, 0.6)),
        ("canny=edges.png:1:.25:1.", ControlFile(CANNY, Path("edges.png"), 1.0, 0.25, 1.0)),
        (r"canny=C:\images\edges.png:0.5", ControlFile(CANNY, Path(r"C:\images\edges.png"), 0.5)),
        (r"canny=C:\images\edges.png", ControlFile(CANNY, Path(r"C:\images\edges.png"))),
        ("canny=a=b.png:-1", ControlFile(CANNY, Path("a=b.png"), -1.0)),
    ],
)
def test_name_file_and_numbers_are_read(text: str, expected: ControlFile) -> None:
    assert parse_control(text) == expected


def test_a_file_whose_name_ends_in_numbers_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges:2").write_bytes(b"")
    assert parse_control("canny=edges:2") == ControlFile(CANNY, Path("edges:2"))


@pytest.mark.parametrize("text", ["canny", "=edges.png", "canny=", ""])
def test_what_names_no_net_or_no_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="does not name a ControlNet and a file"):
        parse_control(text)


def test_two_images_for_one_net_are_refused() -> None:
    with pytest.raises(UsageError, match="'canny' has two images"):
        require_distinct([parse_control(text) for text in ("canny=a.png", "depth=b.png", "canny=c.png")])
