"""What the live view draws, at any width and height."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from small_workflows import Bench

from sdflow.build.listener import Expected
from sdflow.build.plan import make_plan
from sdflow.build.step import Step
from sdflow.cli.live import LiveView
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
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


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def drawn(view: LiveView, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(view.frame())
    return uncoloured(captured.get()).splitlines()


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


# Steps that end


def run(bench: Bench, last: str, columns: int = 80, **how: object) -> str:
    """What a terminal shows of a run of two passes, the second of which appends this."""
    view, console = view_of([], columns)
    passes = [{"pass": "Convert", "text": "a"}, {"pass": "Append", "text": last, **how}]
    workflow = load_workflow(bench.workflow(passes), catalog=registry.catalog(), overrides=["verify=false"])
    options = RunOptions(bench.folder / "out", bench.folder / "results", evaluate=False)
    run_workflow(workflow, bench.cache, options, view)
    view.end()
    assert isinstance(console.file, io.TextIOWrapper) and isinstance(console.file.buffer, io.BytesIO)
    console.file.flush()  # steps end in threads of their own, which no capture of this one sees
    return uncoloured(console.file.buffer.getvalue().decode())


def test_the_steps_of_a_submodel_become_one_line_when_they_are_finished(bench: Bench) -> None:
    first = run(bench, "b")
    assert re.search(r"small unet: 2 steps built in [\d.]+ s, peak [\d.]+ MB\n", first)
    assert first.count("small unet") == 1
    assert re.search(r"small unet: 1 of 2 steps built in ", run(bench, "c"))
    assert run(bench, "c").startswith("nothing to build: all 2 steps are cached\nsmall: done in ")


def test_the_bar_counts_steps_and_says_how_long_they_took_last_time(steps: list[Step]) -> None:
    view, console = view_of([], 120)
    ids = {(step.pipeline, step.submodel): (step.id, f"{step.id} next") for step in steps}
    seconds = {each: 30.0 for chain in ids.values() for each in chain}
    view.expected(Expected(ids, frozenset(), seconds))
    for step in steps:
        view.started(step)
    *lines, bar = drawn(view, console)
    assert all(" s of about 30.0 s " in line and "(1/2)" in line for line in lines)
    assert re.fullmatch(r"  ─{24}  0 of 8 steps, [\d.]+ s, up to (3 min 59|4 min 00) s left", bar)
    unknown = {**seconds}
    unknown.popitem()
    view.expected(Expected(ids, frozenset(), unknown))
    assert drawn(view, console)[-1].endswith(" s"), "no estimate where one step never ran"


@pytest.mark.parametrize("columns", [1, 8, 20, 40, 80])
def test_the_bar_and_what_is_done_besides_fit_any_terminal(steps: list[Step], columns: int) -> None:
    view, console = view_of([], columns)
    view.expected(Expected({(step.pipeline, step.submodel): (step.id,) for step in steps}))
    view.doing("shapes_cpu verify", "unet: comparing with PyTorch")
    lines = drawn(view, console)
    assert len(lines) == 2
    assert max(map(cell_len, lines)) <= max(columns - 1, 1)
    view.doing("shapes_cpu verify", "")
    assert len(drawn(view, console)) == 1
