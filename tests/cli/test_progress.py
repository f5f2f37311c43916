"""What the live view draws, at any width and height."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from sdflow.build.plan import make_plan
from sdflow.build.step import Step
from sdflow.cli.live import LiveView
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.store import Cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The first step of each submodel."""
    cache = Cache(tmp_path_factory.mktemp("cache"))
    plan = make_plan(load_workflow(ROOT / "workflows/shapes_cpu.yaml", catalog=registry.catalog()), cache)
    planned = [each.step for pipeline in plan.every for each in pipeline.steps(cache)]
    return [step for step in planned if step.index == 0]


def view_of(steps: list[Step], columns: int, rows: int = 25, encoding: str = "utf-8") -> tuple[LiveView, Console]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(file=file, force_terminal=True, width=columns, height=rows)
    view = LiveView(console)
    for step in steps:
        view.started(step)
        view.memory(step, 513_000_000)
        view.phase(step, "weights: 0.40 of 1.70 GB of a checkpoint with a long name")
    return view, console


def drawn(view: LiveView, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(view.frame())
    return captured.get().splitlines()


def test_nothing_is_drawn_before_a_step_runs() -> None:
    view, console = view_of([], 80)
    assert "".join(drawn(view, console)).strip() == ""


@pytest.mark.parametrize("columns", [1, 2, 5, 20, 40, 60, 80, 100, 160])
def test_a_step_that_runs_is_one_line_and_never_reaches_the_last_column(steps: list[Step], columns: int) -> None:
    view, console = view_of(steps, columns)
    lines = drawn(view, console)
    assert len(lines) == len(steps) == 4
    assert max(map(cell_len, lines)) <= max(columns - 1, 1)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (160, " 513 MB  shapes_cpu text_encoder OnnxConversion: weights: 0.40 of 1.70 GB of a checkpoint with a long name"),
        (80, " 513 MB  shapes_cpu text_encoder OnnxConversion: weights: 0.40"),
        (60, " 513 MB  shapes_cpu text_encoder OnnxConversion"),
        (48, " s  text_encoder OnnxConversion"),
        (32, "⠋ text_encoder OnnxConversion"),
        (20, "⠋ text_encoder"),
    ],
)  # fmt: skip
def test_where_columns_are_few_whole_words_are_left_out(steps: list[Step], columns: int, shown: str) -> None:
    view, console = view_of(steps, columns)
    (line,) = [each for each in drawn(view, console) if "text_encoder" in each]
    assert shown.removeprefix("⠋ ") in line
    if columns < 80:
        assert line.endswith(shown.split()[-1])


def test_more_steps_than_rows_are_counted(steps: list[Step]) -> None:
    view, console = view_of(steps, 80, rows=4)
    lines = drawn(view, console)
    assert len(lines) == 3
    assert lines[-1] == "and 2 more"


def test_what_a_terminal_without_unicode_lacks_is_not_drawn(steps: list[Step]) -> None:
    view, console = view_of(steps, 80, encoding="ascii")
    assert all(line.isascii() for line in drawn(view, console))


def test_a_phase_with_an_escape_sequence_moves_no_cursor(steps: list[Step]) -> None:
    view, console = view_of(steps[:1], 160)
    view.phase(steps[0], "reading \x1b[2Ja\nb")
    (line,) = drawn(view, console)
    assert "reading \\x1b[2Ja\\nb" in line
