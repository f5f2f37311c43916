"""Tables and lines: whole in a file, fitted to a terminal, with nothing in them that a terminal would obey."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from sdflow.printable import fitted
from sdflow.report.output import put, table_lines

COLUMNS = ("submodel", "pass", "size", "fused operators")
ROWS = [
    ("text_encoder", "OrtTransformersOptimization", "29.9 kB", "Attention 3, SkipLayerNormalization 6, QuickGelu 3"),
    ("unet", "BindWeights", "24 MB", ""),
]


def test_a_file_gets_a_line_a_row() -> None:
    lines = table_lines(COLUMNS, ROWS, ("size",), (), None)
    assert len(lines) == 4
    assert lines[2].split() == " ".join(ROWS[0]).split()


@pytest.mark.parametrize("room", [20, 40, 60, 80, 100, 160])
@pytest.mark.parametrize("below", [(), ("fused operators",)])
def test_on_a_terminal_every_word_of_a_table_is_there_and_whole(room: int, below: tuple[str, ...]) -> None:
    lines = table_lines(COLUMNS, ROWS, ("size",), below, room)
    words = " ".join(lines).replace(":", "").replace(";", "").split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words)
    for line in lines:
        assert len(line) <= room or len(line.split()) == 1


def test_a_column_that_does_not_fit_goes_below_its_row() -> None:
    lines = table_lines(COLUMNS, ROWS, ("size",), ("fused operators",), 60)
    assert lines[0].split() == ["submodel", "pass", "size"]
    assert lines[3].strip().startswith("fused operators: Attention 3")
    assert lines[-1].split() == ["unet", "BindWeights", "24", "MB"]


def test_the_last_column_is_wrapped_in_its_place_where_there_is_room() -> None:
    lines = table_lines(COLUMNS, ROWS, ("size",), ("fused operators",), 84)
    start = lines[0].index("fused operators")
    assert lines[2][start:] == "Attention 3,"
    assert lines[3][:start].strip() == ""
    assert lines[3][start:].startswith("SkipLayerNormalization 6,")


def test_wide_characters_take_two_columns() -> None:
    header, _, first, second = table_lines(("name", "size"), [("日本", "1 B"), ("abcd", "2 B")], (), (), None)
    assert header.index("size") == second.index("2 B") == first.index("1 B") + 2


@hypothesis.given(st.text(alphabet="ab 1sMB-_/,", max_size=200), st.integers(1, 100))
def test_fitting_breaks_lines_between_words_alone(text: str, columns: int) -> None:
    lines = fitted(text, columns)
    assert " ".join(lines).split() == text.split()
    for line in lines:
        assert (
            len(line) <= columns or len(line.replace(" MB", "_MB").replace(" s", "_s").replace(" B", "_B").split()) == 1
        )


def test_a_number_is_not_parted_from_its_unit() -> None:
    assert fitted("built in 0.62 s, peak 303 MB", 27) == ["built in 0.62 s, peak", "  303 MB"]


def test_names_cannot_start_a_line_or_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    put("pipeline: a\nerror: b\x1b[2J", "second")
    assert capsys.readouterr().out == "pipeline: a\\nerror: b\\x1b[2J\nsecond\n"
