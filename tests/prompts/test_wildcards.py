"""Wildcards become lines of their files, the same for a seed on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.prompts.wildcards import Wildcards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "animals").mkdir()
    for name, text in {
        "color": "\ufeffred\n# a comment\n\n  blue \ngreen\n",
        "animals/big_cat": "a __color__ lion\na tiger\n",
        "circle": "x __circle__\n",
        "empty": "# nothing\n",
    }.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    return tmp_path


def test_the_seed_chooses_and_every_line_is_chosen(folder: Path) -> None:
    wildcards = Wildcards(folder)
    drawn = [wildcards.resolve("a __color__ circle on __color__", seed) for seed in range(60)]
    assert drawn == [Wildcards(folder).resolve("a __color__ circle on __color__", seed) for seed in range(60)]
    assert set(drawn) == {
        f"a {one} circle on {two}" for one in ("red", "blue", "green") for two in ("red", "blue", "green")
    }
    assert drawn[:3] == ["a green circle on green", "a blue circle on green", "a red circle on red"], (
        "pinned: PNGs name seeds"
    )


def test_lines_may_have_wildcards_and_names_folders(folder: Path) -> None:
    wildcards = Wildcards(folder)
    drawn = {wildcards.resolve("__animals/big_cat__", seed) for seed in range(60)}
    assert drawn == {"a tiger", "a red lion", "a blue lion", "a green lion"}
    assert wildcards.names() == ["animals/big_cat", "circle", "color", "empty", "latin"]
    assert wildcards.resolve("a_b __ (c:1.2) __../color__", 1) == "a_b __ (c:1.2) __../color__", (
        "no name leads out of it"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("__colour__", r"__colour__: there is no colour\.txt in .*; did you mean 'color'\?"),
        ("__circle__", "__circle__: more than 1000 wildcards"),
        ("__empty__", "__empty__: empty.txt has no lines to choose from"),
        ("__latin__", "__latin__: latin.txt cannot be read: not UTF-8"),
    ],
)
def test_what_cannot_be_resolved_is_refused(folder: Path, text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Wildcards(folder).resolve(text, 0)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        Wildcards(tmp_path / "absent")
